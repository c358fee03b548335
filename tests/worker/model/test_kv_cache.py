"""The pool's tensors: stores by slot, copies of blocks and parts of blocks."""

from __future__ import annotations

import pytest
import torch

from prefixd.kernels.paged_kv import block_slots, copy_slots, store_rows
from prefixd.worker.model.kv_cache import LayerGeometry, PagedKv, block_byte_count
from tests.support.models import CPU

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
