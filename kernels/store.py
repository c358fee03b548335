"""Stores the K and V of new tokens in their slots, quantizing on the way where the pool is 8-bit.

A program takes a tile of tokens for one head, K first, then V: what it reads and writes of one head
is contiguous, and the largest magnitude of a head is found without leaving the program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import AMAX_MIN, FP8_DTYPE, QUANTIZED_MAXIMA, LayerKv
from prefixd.kernels.tiling import power_of_two_at_least

TOKEN_TILE = 16

FORMATS = {torch.int8: "int8", FP8_DTYPE: "fp8"}
"""Names of the 8-bit formats inside the kernel; every other dtype is stored as it is."""


@triton.jit
def store_rows_kernel(
    rows_ptr,
    pool_ptr,
    scales_ptr,
    slots_ptr,
    row_count,
    first_slot,
    slot_count,
    head,
    rows_stride_row,
    rows_stride_head,
    pool_stride_slot,
    pool_stride_head,
    scales_stride_slot,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):
    """Stores K or V of one tile of tokens for one head."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    elements = tl.arange(0, WIDTH_TILE)
    slots = tl.load(slots_ptr + rows, mask=rows < row_count, other=0).to(tl.int64)
    stored = (slots >= first_slot) & (slots < slot_count)
    mask = stored[:, None] & (elements < WIDTH)[None, :]
    source = rows.to(tl.int64)[:, None] * rows_stride_row + head * rows_stride_head
    tile = tl.load(rows_ptr + source + elements[None, :], mask=mask, other=0.0)
    target = slots[:, None] * pool_stride_slot + head * pool_stride_head + elements[None, :]
    if FORMAT == "plain":
        tl.store(pool_ptr + target, tile, mask=mask)
    else:
        tile = tile.to(tl.float32)
        # A maximum may pass over NaN, never over infinity.
        magnitudes = tl.abs(tile)
        amax = tl.max(tl.where(magnitudes < float("inf"), magnitudes, float("inf")), axis=1)
        tile = tl.where((amax < float("inf"))[:, None], tile, 0.0)
        scales = tl.where(amax >= SMALLEST_AMAX, tl.div_rn(amax, QUANTIZED_MAX), 1.0)
        tile = tl.div_rn(tile, tl.broadcast_to(scales[:, None], (TOKENS, WIDTH_TILE)))
        if FORMAT == "int8":
            # Adding and taking away 1.5 * 2^23 rounds half to even, as torch.round does.
            tile = ((tile + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            tile = tile.to(tl.float8e4nv)
        tl.store(pool_ptr + target, tile, mask=mask)
        tl.store(scales_ptr + slots * scales_stride_slot + head, scales, mask=stored)


# Numbers that change from pass to pass must not make new kernels.
@triton.jit(do_not_specialize=["row_count"])
def store_kv_kernel(
    keys_ptr,
    values_ptr,
    key_pool_ptr,
    value_pool_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    row_count,
    first_slot,
    slot_count,
    keys_stride_row,
    keys_stride_head,
    values_stride_row,
    values_stride_head,
    key_pool_stride_slot,
    key_pool_stride_head,
    value_pool_stride_slot,
    value_pool_stride_head,
    scales_stride_slot,
    KEY_WIDTH: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):
    """Stores K and V of one tile of tokens for one head; see ``store_kv``."""
    head = tl.program_id(1)
    store_rows_kernel(
        keys_ptr,
        key_pool_ptr,
        key_scales_ptr,
        slots_ptr,
        row_count,
        first_slot,
        slot_count,
        head,
        keys_stride_row,
        keys_stride_head,
        key_pool_stride_slot,
        key_pool_stride_head,
        scales_stride_slot,
        KEY_WIDTH,
        KEY_TILE,
        TOKENS,
        FORMAT,
        QUANTIZED_MAX,
        SMALLEST_AMAX,
    )
    store_rows_kernel(
        values_ptr,
        value_pool_ptr,
        value_scales_ptr,
        slots_ptr,
        row_count,
        first_slot,
        slot_count,
        head,
        values_stride_row,
        values_stride_head,
        value_pool_stride_slot,
        value_pool_stride_head,
        scales_stride_slot,
        VALUE_WIDTH,
        VALUE_TILE,
        TOKENS,
        FORMAT,
        QUANTIZED_MAX,
        SMALLEST_AMAX,
    )


def store_kv(
    layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
) -> None:
    """Writes ``keys[i]`` and ``values[i]`` to slot ``slots[i]`` of the layer.

    Rows whose slot is -1, in block 0 or beyond the pool are padding: nothing is written for them.
    Twin: ``reference.store_kv``.

    Args:
        layer: the pool.
        keys: (rows, kv heads, key width); of the pool's dtype, or floats where the pool is 8-bit.
        values: (rows, kv heads, value width), likewise.
        slots: int64 (rows,), distinct but for padding.
        block_size: slots per block.
    """
    for launch in store_launches(
        layer, keys=keys, values=values, slots=slots, block_size=block_size
    ):
        launch.run()


def store_launches(
    layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
) -> list[Launch]:
    """The launches of ``store_kv``: one, or none without rows."""
    check_store(layer, keys=keys, values=values, slots=slots, block_size=block_size)
    row_count = slots.shape[0]
    if not row_count:
        return []
    arguments = {
        "keys_ptr": keys,
        "values_ptr": values,
        "key_pool_ptr": layer.keys,
        "value_pool_ptr": layer.values,
        # Any tensor stands for scales that are not there.
        "key_scales_ptr": layer.keys if layer.key_scales is None else layer.key_scales,
        "value_scales_ptr": layer.values if layer.value_scales is None else layer.value_scales,
        "slots_ptr": slots,
        "row_count": row_count,
        "first_slot": block_size,
        "slot_count": layer.slot_count,
        "keys_stride_row": keys.stride(0),
        "keys_stride_head": keys.stride(1),
        "values_stride_row": values.stride(0),
        "values_stride_head": values.stride(1),
        "key_pool_stride_slot": layer.keys.stride(0),
        "key_pool_stride_head": layer.keys.stride(1),
        "value_pool_stride_slot": layer.values.stride(0),
        "value_pool_stride_head": layer.values.stride(1),
        "scales_stride_slot": layer.head_count,
    }
    constants = {
        "KEY_WIDTH": layer.key_width,
        "KEY_TILE": power_of_two_at_least(layer.key_width),
        "VALUE_WIDTH": layer.value_width,
        "VALUE_TILE": power_of_two_at_least(layer.value_width),
        "TOKENS": TOKEN_TILE,
        "FORMAT": FORMATS.get(layer.keys.dtype, "plain"),
        "QUANTIZED_MAX": QUANTIZED_MAXIMA.get(layer.keys.dtype, 1.0),
        "SMALLEST_AMAX": AMAX_MIN,
    }
    grid = (-(-row_count // TOKEN_TILE), layer.head_count)
    return [Launch(store_kv_kernel, grid, arguments, constants)]


def check_store(
    layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
) -> None:
    """Asserts what ``store_kv`` asks of its arguments."""
    rows, heads = slots.shape[0], layer.head_count
    assert keys.shape == (rows, heads, layer.key_width), (keys.shape, rows, layer.keys.shape)
    assert values.shape == (rows, heads, layer.value_width), (values.shape, layer.values.shape)
    assert slots.dtype == torch.int64, slots.dtype
    assert slots.is_contiguous(), "slots are contiguous"
    assert keys.stride(2) == values.stride(2) == 1, "elements of a head are adjacent"
    assert keys.dtype == values.dtype, (keys.dtype, values.dtype)
    if layer.is_quantized:
        assert keys.is_floating_point(), keys.dtype
    else:
        assert keys.dtype == layer.keys.dtype, (keys.dtype, layer.keys.dtype)
    for tensor in (keys, values, slots):
        assert tensor.device == layer.keys.device, (tensor.device, layer.keys.device)
    assert block_size >= 1, block_size
    assert layer.slot_count % block_size == 0, (layer.slot_count, block_size)
