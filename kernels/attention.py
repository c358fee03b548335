"""Paged attention over a work list: decode, tree-shared decode and prefill in one kernel.

An item is a range of positions of one block table and a list of query rows that read it, of one
sequence or of several whose blocks there are the same (see ``prefixd.kernels.planner``). A program
takes an item and a kv head; the query heads of that kv head stand beside the rows in its tile, so
K and V are read once for all of them. Split items leave a partial result per row, which
``prefixd.kernels.reduction`` adds up; whole items read all that their rows see and finish alone.

The recurrence over keys is the one of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018), as used by Dao et al., "FlashAttention" (2022); the split of one row's keys over
programs is that of flash decoding (Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions, check_attention
from prefixd.kernels.reduction import reduction_launches
from prefixd.kernels.tiling import Tile, Tiling, power_of_two_at_least
from prefixd.kernels.work_buffers import WorkTensors

LOG2_E = tl.constexpr(1.4426950408889634)
"""Exponents are taken to base 2, which is what the hardware has."""


# Numbers that change from pass to pass must not make new kernels.
@triton.jit(do_not_specialize=["window", "tables_stride"])
def attention_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    sinks_ptr,
    output_ptr,
    statistics_ptr,
    items_ptr,
    rows_ptr,
    positions_ptr,
    tables_ptr,
    scaling,
    softcap,
    window,
    query_stride_row,
    query_stride_head,
    keys_stride_slot,
    keys_stride_head,
    values_stride_slot,
    values_stride_head,
    output_stride_row,
    tables_stride,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_WIDTH_TILE: tl.constexpr,
    VALUE_WIDTH_TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Computes one item for one kv head; see ``paged_attention``."""
    # The fields of an item, see ITEM_FIELDS.
    item_ptr = items_ptr + tl.program_id(0) * 5
    row_count = tl.load(item_ptr + 4)
    if row_count == 0:
        return
    table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * tables_stride
    first = tl.load(item_ptr + 1)
    end = tl.load(item_ptr + 2)
    row_start = tl.load(item_ptr + 3)
    kv_head = tl.program_id(1)

    lanes = tl.arange(0, ROWS)
    listed = row_start + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    lane_mask = lanes < row_count * GROUP
    rows = tl.load(rows_ptr + listed, mask=lane_mask, other=0).to(tl.int64)
    positions = tl.load(positions_ptr + rows, mask=lane_mask, other=-1)
    end = tl.minimum(end, tl.max(positions, axis=0) + 1)
    if WINDOWED:
        earliest = tl.min(tl.where(lane_mask, positions, 2147483647), axis=0)
        first = tl.maximum(first, earliest - window + 1)

    key_elements = tl.arange(0, KEY_WIDTH_TILE)
    value_elements = tl.arange(0, VALUE_WIDTH_TILE)
    query_offsets = rows * query_stride_row + heads * query_stride_head
    query = tl.load(
        query_ptr + query_offsets[:, None] + key_elements[None, :],
        mask=lane_mask[:, None] & (key_elements < KEY_WIDTH)[None, :],
        other=0.0,
    )
    if SOFTCAPPED:
        score_factor = scaling / softcap
    else:
        score_factor = scaling * LOG2_E

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, VALUE_WIDTH_TILE], tl.float32)
    # Tiles begin at absolute multiples of their size, so that a window's edge moves no sum.
    for tile in range(first // KEYS, tl.cdiv(end, KEYS)):
        key_positions = tile * KEYS + tl.arange(0, KEYS)
        # Behind `end` lie unwritten slots, before `first` maybe freed ones: neither K nor V of
        # them may enter a product, since 0 * NaN is NaN.
        readable = (key_positions >= first) & (key_positions < end)
        blocks = tl.load(table_ptr + key_positions // BLOCK_SIZE, mask=readable, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + key_positions % BLOCK_SIZE
        key_offsets = slots * keys_stride_slot + kv_head * keys_stride_head
        keys = tl.load(
            keys_ptr + key_offsets[:, None] + key_elements[None, :],
            mask=readable[:, None] & (key_elements < KEY_WIDTH)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        scores *= score_factor
        if QUANTIZED:
            scale_offsets = slots * KV_HEADS + kv_head
            key_scales = tl.load(key_scales_ptr + scale_offsets, mask=readable, other=0.0)
            scores *= key_scales[None, :]
        if SOFTCAPPED:
            # tanh by its exponential, from the side where nothing overflows.
            decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
            magnitude = (1.0 - decay) / (1.0 + decay) * (softcap * LOG2_E)
            scores = tl.where(scores < 0.0, -magnitude, magnitude)
        visible = readable[None, :] & (key_positions[None, :] <= positions[:, None])
        if WINDOWED:
            visible &= key_positions[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet would subtract infinity from infinity.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.sum(weights, axis=1)
        peak = new_peak
        value_offsets = slots * values_stride_slot + kv_head * values_stride_head
        values = tl.load(
            values_ptr + value_offsets[:, None] + value_elements[None, :],
            mask=readable[:, None] & (value_elements < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        if QUANTIZED:
            value_scales = tl.load(value_scales_ptr + scale_offsets, mask=readable, other=0.0)
            weights *= value_scales[None, :]
        weighted = tl.dot(
            weights.to(query.dtype),
            values.to(query.dtype),
            weighted * rescale[:, None],
            input_precision="ieee",
        )

    element_mask = lane_mask[:, None] & (value_elements < VALUE_WIDTH)[None, :]
    if WHOLE:
        if SINKS:
            sinks = tl.load(sinks_ptr + heads, mask=lane_mask, other=0.0).to(tl.float32)
            sinks *= LOG2_E
            final_peak = tl.maximum(peak, sinks)
            rescale = tl.exp2(peak - final_peak)
            total = total * rescale + tl.exp2(sinks - final_peak)
            weighted *= rescale[:, None]
        output = weighted / tl.where(lane_mask, total, 1.0)[:, None]
        offsets = rows * output_stride_row + heads * VALUE_WIDTH
        tl.store(
            output_ptr + offsets[:, None] + value_elements[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=element_mask,
        )
    else:
        partials = listed.to(tl.int64) * (KV_HEADS * GROUP) + heads
        offsets = partials * VALUE_WIDTH
        tl.store(
            output_ptr + offsets[:, None] + value_elements[None, :], weighted, mask=element_mask
        )
        tl.store(statistics_ptr + partials * 2, peak, mask=lane_mask)
        tl.store(statistics_ptr + partials * 2 + 1, total, mask=lane_mask)


def paged_attention(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    tiling: Tiling,
) -> Tensor:
    """Attends with every row of a pass over the paged KV, whose rows are stored already.

    Twin: ``reference.paged_attention``.

    Args:
        query: (rows, query heads, key width), on the layer's device; of the layer's dtype, or a
            float of 16 or 32 bits where the layer is 8-bit.
        layer: the pool.
        work: of this pass, made for ``tiling`` and the window of ``options``.
        options: what the layer asks of attention.
        tiling: tile sizes.

    Returns:
        (rows, query heads, value width), of the query's dtype; zeros for padding rows.
    """
    output = query.new_empty((*query.shape[:2], layer.value_width))
    for launch in attention_launches(query, layer, work, options, tiling, output=output):
        launch.run()
    return output


def attention_launches(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    tiling: Tiling,
    *,
    output: Tensor,
) -> list[Launch]:
    """The launches of ``paged_attention``, which fill ``output``, in their order."""
    check_attention(query, layer, work, options, tiling)
    shape = (work.partial_count, *output.shape[1:])
    partials = query.new_empty(shape, dtype=torch.float32)
    statistics = query.new_empty((*shape[:2], 2), dtype=torch.float32)
    launches = []
    for items, tile, target in (
        (work.narrow_items, tiling.narrow, partials),
        (work.wide_items, tiling.wide, partials),
        (work.whole_items, tiling.whole, output),
    ):
        if items.shape[0]:
            launches.append(
                Launch(
                    attention_kernel,
                    (items.shape[0], layer.head_count),
                    _arguments(query, layer, work, options, items, target, statistics),
                    {**_constants(query, layer, work, options, tile), "WHOLE": target is output},
                    tile.warp_count,
                    tile.stage_count,
                )
            )
    return [*launches, *reduction_launches(partials, statistics, work, options, output)]


def _arguments(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    items: Tensor,
    output: Tensor,
    statistics: Tensor,
) -> dict[str, Tensor | int | float]:
    # What a layer lacks is never read: any tensor stands for it.
    return {
        "query_ptr": query,
        "keys_ptr": layer.keys,
        "values_ptr": layer.values,
        "key_scales_ptr": statistics if layer.key_scales is None else layer.key_scales,
        "value_scales_ptr": statistics if layer.value_scales is None else layer.value_scales,
        "sinks_ptr": statistics if options.sinks is None else options.sinks,
        "output_ptr": output,
        "statistics_ptr": statistics,
        "items_ptr": items,
        "rows_ptr": work.rows,
        "positions_ptr": work.positions,
        "tables_ptr": work.block_tables,
        "scaling": options.scaling,
        "softcap": options.softcap or 0.0,
        "window": options.window_token_count or 0,
        "query_stride_row": query.stride(0),
        "query_stride_head": query.stride(1),
        "keys_stride_slot": layer.keys.stride(0),
        "keys_stride_head": layer.keys.stride(1),
        "values_stride_slot": layer.values.stride(0),
        "values_stride_head": layer.values.stride(1),
        "output_stride_row": output.stride(0),
        "tables_stride": work.block_tables.stride(0),
    }


def _constants(
    query: Tensor, layer: LayerKv, work: WorkTensors, options: AttentionOptions, tile: Tile
) -> dict[str, int | bool]:
    return {
        "KEY_WIDTH": layer.key_width,
        "VALUE_WIDTH": layer.value_width,
        # Products want at least 16 elements on each side.
        "KEY_WIDTH_TILE": max(16, power_of_two_at_least(layer.key_width)),
        "VALUE_WIDTH_TILE": max(16, power_of_two_at_least(layer.value_width)),
        "KV_HEADS": layer.head_count,
        "GROUP": query.shape[1] // layer.head_count,
        "BLOCK_SIZE": work.block_size,
        "ROWS": tile.row_tile,
        "KEYS": tile.key_tile,
        "QUANTIZED": layer.is_quantized,
        "WINDOWED": options.window_token_count is not None,
        "SOFTCAPPED": options.softcap is not None,
        "SINKS": options.sinks is not None,
    }
