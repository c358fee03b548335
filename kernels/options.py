"""What a layer asks of attention, and what attention asks of its arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.tiling import Tiling
from prefixd.kernels.work_buffers import WorkTensors

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer asks of attention beside queries and KV.

    Attributes:
        scaling: factor of the scores.
        window_token_count: a query at q sees keys in (q - window, q]; None sees all up to q.
        softcap: scores s become softcap * tanh(s / softcap); None leaves them.
        sinks: (query heads,), one extra logit per head that takes probability and gives no value;
            None adds none.
    """

    scaling: float
    window_token_count: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def check_attention(
    query: Tensor,
    layer: LayerKv,
    work: WorkTensors,
    options: AttentionOptions,
    tiling: Tiling,
) -> None:
    """Asserts what ``paged_attention`` asks of its arguments."""
    assert query.dim() == 3, query.shape
    row_count, head_count, width = query.shape
    assert width == layer.key_width, (query.shape, layer.keys.shape)
    assert head_count % layer.head_count == 0, (query.shape, layer.keys.shape)
    assert query.stride(2) == 1, "elements of a query head are adjacent"
    assert query.dtype in QUERY_DTYPES, query.dtype
    assert layer.is_quantized or query.dtype == layer.keys.dtype, (query.dtype, layer.keys.dtype)
    assert layer.slot_count == work.block_count * work.block_size, (layer.slot_count, work)
    assert row_count == work.positions.shape[0], (row_count, work.positions.shape)
    for tensor in (layer.keys, work.rows):
        assert tensor.device == query.device, (tensor.device, query.device)
    group_size, sizes = head_count // layer.head_count, work.sizes
    for tile, planned_row_count in (
        (tiling.narrow, sizes.narrow_row_count),
        (tiling.wide, sizes.wide_row_count),
        (tiling.whole, sizes.whole_row_count),
    ):
        assert planned_row_count == tile.query_row_count(group_size), (tile, sizes)
    assert sizes.window_token_count == options.window_token_count, (sizes, options)
    assert options.softcap is None or options.softcap > 0, options.softcap
    if options.sinks is not None:
        assert options.sinks.shape == (head_count,), (options.sinks.shape, head_count)
        assert options.sinks.device == query.device, (options.sinks.device, query.device)
        assert options.sinks.is_contiguous(), "sinks are contiguous"
