"""The pool's tensors: stores by slot, copies of blocks and parts of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.kernels.layer_kv import FP8_DTYPE, dequantize
from prefixd.kernels.paged_kv import block_slots, copy_slots, store_rows
from prefixd.worker.model.kv_cache import LayerGeometry, PagedKv, block_byte_count
from tests.support.models import CPU

KV_DTYPES_8_BIT = (torch.int8, FP8_DTYPE)
GEOMETRY = (LayerGeometry(2, 4, 4), LayerGeometry(1, 6, 3))


@pytest.fixture
def kv() -> PagedKv:
    """6 blocks of 4 slots whose K and V hold their slot's number."""
    pool = PagedKv(GEOMETRY, block_count=6, block_size=4, dtype=torch.float32, device=CPU)
    slots = torch.arange(24)
    for index, layer in enumerate(GEOMETRY):
        rows = slots.float()[:, None, None]
        pool.store(
            index,
            keys=rows.expand(-1, layer.kv_head_count, layer.key_width),
            values=-rows.expand(-1, layer.kv_head_count, layer.value_width),
            slots=slots,
        )
    return pool


def test_layers_keep_their_own_shapes(kv: PagedKv) -> None:
    """Heads and widths may differ between layers, and V from K."""
    shapes = [(kv.layer(layer).keys.shape, kv.layer(layer).values.shape) for layer in range(2)]
    assert [((24, 2, 4), (24, 2, 4)), ((24, 1, 6), (24, 1, 3))] == shapes


def test_store_writes_the_named_slots_only(kv: PagedKv) -> None:
    """Rows may come in any order and with any strides."""
    rows = torch.full((2, 4, 2), 99.0).transpose(1, 2)
    kv.store(0, keys=rows, values=rows, slots=torch.tensor([17, 5]))
    changed = (kv.layer(0).keys[:, 0, 0] != torch.arange(24)).nonzero().flatten()
    assert [5, 17] == changed.tolist()


def test_copy_takes_the_first_tokens_of_each_block_in_every_layer(kv: PagedKv) -> None:
    """The rest of a target keeps what it held."""
    kv.copy_blocks(source_block_ids=[1, 2], target_block_ids=[4, 5], token_counts=[3, 4])
    expected = [*range(16), 4, 5, 6, 19, 8, 9, 10, 11]
    for layer in range(kv.page_count):
        assert expected == kv.layer(layer).keys[:, 0, 0].tolist()
        assert [-slot for slot in expected] == kv.layer(layer).values[:, 0, 0].tolist()


def test_block_bytes_are_the_pool_bytes_over_its_blocks(kv: PagedKv) -> None:
    """So a pool can be sized by memory before it is made."""
    per_block = block_byte_count(GEOMETRY, block_size=4, dtype=torch.float32)
    assert 6 * per_block == kv.byte_count


@pytest.mark.parametrize("dtype", KV_DTYPES_8_BIT, ids=str)
def test_8_bit_tokens_come_back_within_their_format(dtype: torch.dtype) -> None:
    """Each head has a scale of its own, so a large one beside it costs a small one nothing."""
    pool = PagedKv(GEOMETRY, block_count=6, block_size=4, dtype=dtype, device=CPU)
    sizes = torch.tensor([1e-3, 1e3])[:, None]
    keys, values = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(1)) * sizes
    slots = torch.tensor([7, 21, 4])
    pool.store(0, keys=keys, values=values, slots=slots)
    stored = pool.layer(0)
    for rows, elements, scales in (
        (keys, stored.keys, stored.key_scales),
        (values, stored.values, stored.value_scales),
    ):
        assert scales is not None
        error = dequantize(elements[slots], scales[slots]) - rows
        assert (error.abs() <= rows.abs().amax(-1, keepdim=True) / 16).all()


@pytest.mark.parametrize("dtype", KV_DTYPES_8_BIT, ids=str)
def test_8_bit_tokens_depend_on_themselves_alone(dtype: torch.dtype) -> None:
    """Stored among others or alone, and stored as copies: the same bytes and the same scales."""
    keys = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(2))
    together = PagedKv(GEOMETRY[:1], block_count=6, block_size=4, dtype=dtype, device=CPU)
    together.store(0, keys=keys, values=-keys, slots=torch.arange(4, 8))
    alone = PagedKv(GEOMETRY[:1], block_count=6, block_size=4, dtype=dtype, device=CPU)
    for row in range(4):
        rows = keys[row : row + 1]
        alone.store(0, keys=rows, values=-rows, slots=torch.tensor([8 + row]))
    alone.copy_blocks(source_block_ids=[2], target_block_ids=[5], token_counts=[3])
    for one, other in zip(together.layer(0).tensors, alone.layer(0).tensors, strict=True):
        assert torch.equal(_bytes(one[4:8]), _bytes(other[8:12]))
        assert torch.equal(_bytes(one[4:7]), _bytes(other[20:23]))
        assert not _bytes(other[23]).any(), "behind what is copied a target keeps what it held"


@settings(max_examples=50)
@given(
    dtype=st.sampled_from((torch.float32, *KV_DTYPES_8_BIT)),
    operations=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))),
    seed=st.integers(0, 1000),
)
def test_a_slot_holds_the_token_that_was_put_there_last(
    dtype: torch.dtype, operations: list[tuple[int, int, int]], seed: int
) -> None:
    """Whatever is stored and copied in between: the bits that the token has alone in a pool."""
    generator = torch.Generator().manual_seed(seed)
    pool = PagedKv(GEOMETRY[:1], block_count=6, block_size=4, dtype=dtype, device=CPU)
    tokens: dict[int, torch.Tensor] = {}
    for source, target, count in operations:
        targets = [4 * target + offset for offset in range(count)]
        if source == target:
            keys = torch.randn(count, 2, 4, generator=generator)
            pool.store(0, keys=keys, values=-keys, slots=torch.tensor(targets, dtype=torch.int64))
            tokens |= dict(zip(targets, keys, strict=True))
            continue
        pool.copy_blocks(source_block_ids=[source], target_block_ids=[target], token_counts=[count])
        for offset, slot in enumerate(targets):
            tokens.pop(slot, None)
            if 4 * source + offset in tokens:
                tokens[slot] = tokens[4 * source + offset]
    alone = PagedKv(GEOMETRY[:1], block_count=6, block_size=4, dtype=dtype, device=CPU)
    for slot, keys in tokens.items():
        alone.store(0, keys=keys[None], values=-keys[None], slots=torch.tensor([slot]))
    for one, other in zip(pool.layer(0).tensors, alone.layer(0).tensors, strict=True):
        assert torch.equal(_bytes(one), _bytes(other))


@pytest.mark.parametrize("dtype", KV_DTYPES_8_BIT, ids=str)
def test_8_bit_zeros_are_numbers(dtype: torch.dtype) -> None:
    """A head of zeros, or too small to scale, and what nobody wrote read as zeros, never as NaN."""
    pool = PagedKv(GEOMETRY[:1], block_count=2, block_size=4, dtype=dtype, device=CPU)
    keys = torch.tensor([0.0, 1e-40])[:, None, None].expand(-1, 2, 4)
    pool.store(0, keys=keys, values=keys, slots=torch.tensor([4, 5]))
    layer = pool.layer(0)
    assert not dequantize(layer.keys, layer.key_scales).any()
    assert not dequantize(layer.values, layer.value_scales).any()


@pytest.mark.parametrize("dtype", KV_DTYPES_8_BIT, ids=str)
def test_memory_of_8_bit_tokens_counts_their_scales(dtype: torch.dtype) -> None:
    """A byte per element and eight per head, in the pool as in what it is sized by."""
    pool = PagedKv(GEOMETRY, block_count=6, block_size=4, dtype=dtype, device=CPU)
    token_byte_count = (2 * (4 + 4) + 2 * 8) + (1 * (6 + 3) + 1 * 8)
    assert token_byte_count == pool.slot_byte_count
    assert 4 * token_byte_count == block_byte_count(GEOMETRY, block_size=4, dtype=dtype)
    assert 6 * 4 * token_byte_count == pool.byte_count


def test_block_slots_lie_one_block_behind_the_other() -> None:
    """Counts of zero and of a whole block are fine."""
    block_ids, counts = torch.tensor([3, 1, 2]), torch.tensor([2, 0, 4])
    assert [12, 13, 8, 9, 10, 11] == block_slots(block_ids, counts, block_size=4).tolist()


def test_copy_slots_reads_every_source_first() -> None:
    """Slots may be exchanged."""
    pool = torch.arange(4.0)[:, None, None]
    copy_slots(pool, source_slots=torch.tensor([1, 2]), target_slots=torch.tensor([2, 1]))
    assert [0.0, 2.0, 1.0, 3.0] == pool.flatten().tolist()


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(3, 1, 2), torch.zeros(2, 2, 2), torch.zeros(2, 1, 2, dtype=torch.float64)],
    ids=["row_count", "heads", "dtype"],
)
def test_store_refuses_rows_that_do_not_fit(rows: torch.Tensor) -> None:
    """Nothing is converted or broadcast silently."""
    pool = torch.ones(8, 1, 2)
    with pytest.raises(AssertionError):
        store_rows(pool, rows, torch.tensor([1, 2]))
    assert pool.eq(1).all()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
