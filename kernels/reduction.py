"""Adds up the partial results of split rows, in the order of their positions."""

import triton
import triton.language as tl
from torch import Tensor

from prefixd.kernels.launch import Launch
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.tiling import power_of_two_at_least
from prefixd.kernels.work_buffers import WorkTensors

LOG2_E = tl.constexpr(1.4426950408889634)


# Numbers that change from pass to pass must not make new kernels.
@triton.jit(do_not_specialize=["row_count"])
def reduction_kernel(
    partials_ptr,
    statistics_ptr,
    reductions_ptr,
    order_ptr,
    sinks_ptr,
    output_ptr,
    row_count,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_WIDTH_TILE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up one row for one query head; see ``reduce_partials``."""
    reduction_ptr = reductions_ptr + tl.program_id(0) * 3
    head = tl.program_id(1)
    row = tl.load(reduction_ptr)
    if row >= row_count:
        return
    start = tl.load(reduction_ptr + 1)
    end = tl.load(reduction_ptr + 2)

    peak = float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        peak = sink
    for index in range(start, end):
        partial = tl.load(order_ptr + index).to(tl.int64) * HEADS + head
        peak = tl.maximum(peak, tl.load(statistics_ptr + partial * 2))
    base = tl.where(peak == float("-inf"), 0.0, peak)

    elements = tl.arange(0, VALUE_WIDTH_TILE)
    element_mask = elements < VALUE_WIDTH
    weighted = tl.zeros([VALUE_WIDTH_TILE], tl.float32)
    total = 0.0
    if SINKS:
        total = tl.exp2(sink - base)
    for index in range(start, end):
        partial = tl.load(order_ptr + index).to(tl.int64) * HEADS + head
        factor = tl.exp2(tl.load(statistics_ptr + partial * 2) - base)
        total += factor * tl.load(statistics_ptr + partial * 2 + 1)
        offsets = partial * VALUE_WIDTH + elements
        weighted += factor * tl.load(partials_ptr + offsets, mask=element_mask, other=0.0)
    # A padding row has no partials: it becomes zero.
    output = weighted / tl.where(total > 0.0, total, 1.0)
    offsets = (row.to(tl.int64) * HEADS + head) * VALUE_WIDTH + elements
    tl.store(output_ptr + offsets, output.to(output_ptr.dtype.element_ty), mask=element_mask)


def reduce_partials(
    partials: Tensor,
    statistics: Tensor,
    work: WorkTensors,
    options: AttentionOptions,
    output: Tensor,
) -> None:
    """Writes the rows that were split, and zeros for padding rows; leaves the others.

    Twin: ``reference.reduce_partials``.

    Args:
        partials: float32 (partials, query heads, value width), sums of weighted values.
        statistics: float32 (partials, query heads, 2): the largest score to base 2, and the sum of
            weights relative to it.
        work: which partials belong to which row.
        options: for the sinks.
        output: (rows, query heads, value width), contiguous.
    """
    for launch in reduction_launches(partials, statistics, work, options, output):
        launch.run()


def reduction_launches(
    partials: Tensor,
    statistics: Tensor,
    work: WorkTensors,
    options: AttentionOptions,
    output: Tensor,
) -> list[Launch]:
    """The launches of ``reduce_partials``: one, or none where no row was split."""
    check_reduction(partials, statistics, work, output)
    reduction_count, head_count = work.reductions.shape[0], output.shape[1]
    if not reduction_count:
        return []
    arguments = {
        "partials_ptr": partials,
        "statistics_ptr": statistics,
        "reductions_ptr": work.reductions,
        "order_ptr": work.partial_order,
        # Any tensor stands for sinks that are not there.
        "sinks_ptr": statistics if options.sinks is None else options.sinks,
        "output_ptr": output,
        "row_count": output.shape[0],
    }
    constants = {
        "HEADS": head_count,
        "VALUE_WIDTH": output.shape[2],
        "VALUE_WIDTH_TILE": power_of_two_at_least(output.shape[2]),
        "SINKS": options.sinks is not None,
    }
    grid = (reduction_count, head_count)
    return [Launch(reduction_kernel, grid, arguments, constants, warp_count=1)]


def check_reduction(
    partials: Tensor, statistics: Tensor, work: WorkTensors, output: Tensor
) -> None:
    """Asserts what ``reduce_partials`` asks of its arguments."""
    assert partials.shape == (work.partial_count, *output.shape[1:]), (partials.shape, output.shape)
    assert statistics.shape == (*partials.shape[:2], 2), (statistics.shape, partials.shape)
    for tensor in (partials, statistics, output):
        assert tensor.is_contiguous(), "reduction works on contiguous tensors"
        assert tensor.device == work.reductions.device, (tensor.device, work.reductions.device)
