from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefixd.kernels import reference, store
from prefixd.kernels.layer_kv import FP8_DTYPE, QUANTIZED_MAXIMA, LayerKv, dequantize

BLOCK_SIZE = 4
SLOT_COUNT = 48


def make_layer(dtype: torch.dtype, *, key_width: int = 16, value_width: int = 16) -> LayerKv:
    """A pool of 2 heads, filled with a number that no test stores."""
    scales = None
    if dtype in QUANTIZED_MAXIMA:
        scales = torch.full((SLOT_COUNT, 2), 7.0)
    return LayerKv(
        torch.full((SLOT_COUNT, 2, key_width), 7.0).to(dtype),
        torch.full((SLOT_COUNT, 2, value_width), 7.0).to(dtype),
        scales,
        None if scales is None else scales.clone(),
    )


def check(layer: LayerKv, twin: LayerKv, keys: Tensor, values: Tensor, slots: list[int]) -> None:
    """Kernel and twin leave the same bits."""
    at = torch.tensor(slots)
    store.store_kv(layer, keys=keys, values=values, slots=at, block_size=BLOCK_SIZE)
    reference.store_kv(twin, keys=keys, values=values, slots=at, block_size=BLOCK_SIZE)
    for actual, expected in zip(layer.tensors, twin.tensors, strict=True):
        assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))


def rows(count: int, width: int, *, seed: int = 0) -> Tensor:
    """Random rows of 2 heads, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((count, 2, width), generator=generator)
    return noise * torch.logspace(-3, 3, count * 2).view(count, 2, 1)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_land_in_their_slots(count: int, dtype: torch.dtype) -> None:
    """Exactly the named slots change, to exactly the rows."""
    layer = make_layer(dtype)
    keys, values = rows(count, 16).to(dtype), rows(count, 16, seed=1).to(dtype)
    slots = (torch.randperm(SLOT_COUNT - BLOCK_SIZE)[:count] + BLOCK_SIZE).tolist()
    check(layer, make_layer(dtype), keys, values, slots)
    assert torch.equal(keys, layer.keys[slots])
    assert torch.equal(values, layer.values[slots])
    assert count == int((layer.keys != 7.0).any(dim=(1, 2)).sum())


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8_DTYPE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_rows_equal_the_twin_bit_for_bit(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """One scale per (token, head), rounding half to even."""
    keys, values = rows(9, 24).to(dtype), rows(9, 16, seed=1).to(dtype)
    layer = make_layer(kv_dtype, key_width=24)
    check(layer, make_layer(kv_dtype, key_width=24), keys, values, list(range(4, 13)))
    assert layer.key_scales is not None
    stored = layer.keys[4:13].float() * layer.key_scales[4:13, :, None]
    step = {torch.int8: 1 / 254, FP8_DTYPE: 1 / 16}[kv_dtype]
    largest = keys.float().abs().amax(-1, keepdim=True)
    assert ((stored - keys.float()).abs() <= largest * step * 1.01).all()


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8_DTYPE])
def test_8_bit_zeros_stay_zeros(kv_dtype: torch.dtype) -> None:
    """A head of zeros, or too small to scale, is stored as zeros with a finite scale."""
    keys = torch.zeros(2, 2, 16)
    keys[1] = 1e-38
    layer = make_layer(kv_dtype)
    check(layer, make_layer(kv_dtype), keys, keys, [5, 9])
    assert not layer.keys[[5, 9]].float().any()


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8_DTYPE])
@pytest.mark.parametrize("element", [torch.nan, torch.inf])
def test_no_number_is_read_from_a_head_that_is_not_finite(
    kv_dtype: torch.dtype, element: float
) -> None:
    """Zeros of an infinite scale, which are NaN."""
    keys = torch.ones(2, 2, 16)
    keys[1, 0, 5] = element
    layer = make_layer(kv_dtype)
    check(layer, make_layer(kv_dtype), keys, keys, [5, 9])
    assert layer.key_scales is not None
    read = dequantize(layer.keys[[5, 9]], layer.key_scales[[5, 9]])
    assert read[1, 0].isnan().all()
    assert torch.equal(read[1, 1], read[0, 0])


def test_padding_rows_write_nothing() -> None:
    """Slot -1, block 0 and slots beyond the pool are skipped, whatever their rows hold."""
    layer = make_layer(torch.float32)
    bad = torch.full((4, 2, 16), torch.nan)
    slots = [-1, 0, BLOCK_SIZE - 1, SLOT_COUNT]
    check(layer, make_layer(torch.float32), bad, bad, slots)
    assert (layer.keys == 7.0).all()


def test_strided_rows() -> None:
    """K and V as transformers hands them over: heads before tokens."""
    layer = make_layer(torch.float32)
    keys = rows(5, 16).transpose(0, 1).contiguous().transpose(0, 1)
    assert not keys.is_contiguous()
    check(layer, make_layer(torch.float32), keys, keys, [4, 8, 12, 16, 20])


def test_wrong_arguments_are_refused() -> None:
    """Shapes, dtypes and devices are checked before anything is written."""
    layer = make_layer(torch.float32)
    good = rows(2, 16)
    slots = torch.tensor([4, 5])
    cases = {
        "shape": {"keys": good[:1]},
        "dtype": {"keys": good.half(), "values": good.half()},
        "slots": {"slots": slots.int()},
        "device": {"keys": good.to("meta")},
        "blocks": {"block_size": 5},
    }
    for wrong in cases.values():
        arguments = {"keys": good, "values": good, "slots": slots, "block_size": 4} | wrong
        with pytest.raises(AssertionError):
            store.store_kv(layer, **arguments)
    assert (layer.keys == 7.0).all()
