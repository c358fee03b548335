"""Plain torch twins of the kernels: the same arguments, the same results up to rounding.

They walk the work list as the kernels do, one item at a time, so they test the planner and the
arithmetic on any device; they are written to be read, not to be fast.
"""

import math

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv, dequantize, quantize_rows
from prefixd.kernels.options import AttentionOptions, check_attention
from prefixd.kernels.tiling import Tiling
from prefixd.kernels.work_buffers import WorkTensors


def store_kv(
    layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
) -> None:
    """See ``store.store_kv``."""
    stored = (slots >= block_size) & (slots < layer.slot_count)
    targets = slots[stored]
    for rows, pool, scales in (
        (keys[stored], layer.keys, layer.key_scales),
        (values[stored], layer.values, layer.value_scales),
    ):
        if scales is None:
            pool[targets] = rows
        else:
            quantized = quantize_rows(rows, pool.dtype)
            pool[targets] = quantized.elements
            scales[targets] = quantized.scales


def copy_blocks(
    pool: Tensor,
    *,
    source_block_ids: Tensor,
    target_block_ids: Tensor,
    token_counts: Tensor,
    block_size: int,
) -> None:
    """See ``copy_blocks.copy_blocks``."""
    blocks = pool.view(-1, block_size, *pool.shape[1:])
    sources, targets = source_block_ids.tolist(), target_block_ids.tolist()
    for source, target, count in zip(sources, targets, token_counts.tolist(), strict=True):
        blocks[target, :count] = blocks[source, :count]


def paged_attention(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    tiling: Tiling,
) -> Tensor:
    """See ``attention.paged_attention``; sums in float32."""
    check_attention(query, layer, work, options, tiling)
    output = query.new_zeros((*query.shape[:2], layer.value_width), dtype=torch.float32)
    partials = output.new_zeros((work.partial_count, *output.shape[1:]))
    statistics = output.new_zeros((work.partial_count, query.shape[1], 2))
    for items in (work.narrow_items, work.wide_items):
        for item in items.tolist():
            listed = slice(item[3], item[3] + item[4])
            if item[4]:
                weighted, peak, total = _attend_item(query, layer, work, options, item)
                partials[listed] = weighted
                statistics[listed, :, 0] = peak
                statistics[listed, :, 1] = total
    for item in work.whole_items.tolist():
        if item[4]:
            rows = work.rows[item[3] : item[3] + item[4]].long()
            weighted, peak, total = _attend_item(query, layer, work, options, item)
            output[rows] = _with_sinks(weighted, peak, total, options)
    reduce_partials(partials, statistics, work, options, output)
    return output.to(query.dtype)


def reduce_partials(
    partials: Tensor,
    statistics: Tensor,
    work: WorkTensors,
    options: AttentionOptions,
    output: Tensor,
) -> None:
    """See ``reduction.reduce_partials``."""
    for row, start, end in work.reductions.tolist():
        if row >= output.shape[0]:
            continue
        if start == end:
            output[row] = 0
            continue
        order = work.partial_order[start:end].long()
        peaks, totals = statistics[order].unbind(-1)
        peak = peaks.amax(0)
        factors = torch.exp2(peaks - peak)
        weighted = (factors[..., None] * partials[order]).sum(0)
        total = (factors * totals).sum(0)
        output[row] = _with_sinks(weighted, peak, total, options).to(output.dtype)


def _attend_item(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    item: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of weighted values (rows, heads, width), peaks and totals (rows, heads) of an item."""
    table_row, first, end, row_start, row_count = item
    rows = work.rows[row_start : row_start + row_count].long()
    positions = work.positions[rows].long()
    end = min(end, int(positions.max()) + 1)
    if options.window_token_count is not None:
        first = max(first, int(positions.min()) - options.window_token_count + 1)
    key_positions = torch.arange(first, end, device=query.device)
    blocks = work.block_tables[table_row, key_positions // work.block_size].long()
    slots = blocks * work.block_size + key_positions % work.block_size
    group_size = query.shape[1] // layer.head_count

    def read(pool: Tensor, scales: Tensor | None) -> Tensor:
        heads = dequantize(pool[slots], None if scales is None else scales[slots])
        return heads.repeat_interleave(group_size, dim=1)

    keys = read(layer.keys, layer.key_scales)
    values = read(layer.values, layer.value_scales)
    scores = torch.einsum("rhw,khw->rhk", query[rows].float(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    hidden = key_positions > positions[:, None]
    if options.window_token_count is not None:
        hidden |= key_positions <= positions[:, None] - options.window_token_count
    scores = scores.masked_fill(hidden[:, None], -torch.inf) * math.log2(math.e)
    peak = scores.amax(-1)
    base = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp2(scores - base[..., None])
    return torch.einsum("rhk,khw->rhw", weights, values), peak, weights.sum(-1)


def _with_sinks(weighted: Tensor, peak: Tensor, total: Tensor, options: AttentionOptions) -> Tensor:
    """Divides by the sum of all weights, those of sinks included: (..., heads, width)."""
    if options.sinks is not None:
        total = total + torch.exp2(options.sinks.float() * math.log2(math.e) - peak)
    return weighted / total[..., None]
