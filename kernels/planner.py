"""Plans the attention of one pass: which program reads which positions for which rows.

Contexts are cut into splits at absolute multiples of a fixed size. Where the blocks of a complete
split are the same for several sequences, their rows are listed together and the split is read
once: any tree of shared prefixes is found this way, without being told of it. Rows of a long
prefill chunk are many enough by themselves: they read their whole context in one go.

Everything is vectorised over (sequence, split) pairs, here called units.
"""

from dataclasses import dataclass

import numpy as np

from prefixd.kernels.grouping import Units, group_units
from prefixd.kernels.tiling import Tiling
from prefixd.kernels.work_list import (
    Int32Array,
    Int64Array,
    PassLayout,
    PlanSizes,
    WorkList,
    ranks_within,
)

POSITION_MAX = 2**31 - 1


def plan_sizes(tiling: Tiling, *, group_size: int, window_token_count: int | None) -> PlanSizes:
    """The sizes that a tiling asks for.

    Args:
        tiling: of the layers.
        group_size: query heads per kv head.
        window_token_count: of the layers.
    """
    return PlanSizes(
        narrow_row_count=tiling.narrow.query_row_count(group_size),
        wide_row_count=tiling.wide.query_row_count(group_size),
        whole_row_count=tiling.whole.query_row_count(group_size),
        split_token_count=tiling.split_token_count,
        window_token_count=window_token_count,
    )


@dataclass(frozen=True, slots=True)
class _Splits:
    """Which splits each sequence reads: int64 (sequences,) each; empty for long queries."""

    first: Int64Array
    end: Int64Array
    complete_end: Int64Array

    def equals(self, other: "_Splits") -> bool:
        pairs = ((self.first, other.first), (self.end, other.end))
        return all(np.array_equal(a, b) for a, b in pairs) and np.array_equal(
            self.complete_end, other.complete_end
        )


class Planner:
    """Makes work lists, and gives the last one again while nothing moved.

    A list names splits, not the positions in them, and a program ends where its rows do. So it
    stays valid while rows advance within their splits and while the blocks of complete splits stay
    what they are; a step of decode mostly costs a comparison.
    """

    def __init__(self, sizes: PlanSizes) -> None:
        self.sizes = sizes
        self._last: tuple[PassLayout, _Splits, WorkList] | None = None

    def plan(self, layout: PassLayout) -> WorkList:
        """The work list of a pass; the very same object as last time while it is still right."""
        splits = _splits_of(layout, self.sizes)
        if self._last is not None:
            last_layout, last_splits, work = self._last
            if _is_still_right(last_layout, last_splits, layout, splits, self.sizes):
                return work
        work = plan_work(layout, self.sizes)
        # The caller may go on writing into its table.
        self._last = (_with_own_table(layout), splits, work)
        return work


def plan_work(layout: PassLayout, sizes: PlanSizes) -> WorkList:
    """Makes the work list of a pass from nothing."""
    units = _units_of(layout, _splits_of(layout, sizes), sizes)
    grouping = group_units(units, layout, sizes.split_token_count)
    units = units.reordered(grouping.order)
    ranks = ranks_within(units.row_counts)
    split_rows = np.repeat(units.row_starts, units.row_counts) + ranks
    narrow, wide = _split_items(units, grouping.group_starts, sizes)
    whole, whole_rows = _whole_items(layout, sizes, row_start=len(split_rows))
    reductions, partial_order = _reductions(
        split_rows, np.repeat(units.splits, units.row_counts), whole_rows, layout.row_count
    )
    return WorkList(
        narrow_items=narrow,
        wide_items=wide,
        whole_items=whole,
        rows=np.concatenate([split_rows, whole_rows]).astype(np.int32),
        partial_count=len(split_rows),
        reductions=reductions,
        partial_order=partial_order,
        sizes=sizes,
    )


def _splits_of(layout: PassLayout, sizes: PlanSizes) -> _Splits:
    split = sizes.split_token_count
    first = np.zeros_like(layout.query_starts)
    if sizes.window_token_count is not None:
        first = np.maximum(0, layout.start_positions - sizes.window_token_count + 1) // split
    end = -(-layout.context_token_counts // split)
    end = np.where(layout.query_token_counts < sizes.long_query_row_count, end, first)
    return _Splits(first, end, np.minimum(end, layout.context_token_counts // split))


def _units_of(layout: PassLayout, splits: _Splits, sizes: PlanSizes) -> Units:
    counts = splits.end - splits.first
    sequences = np.repeat(np.arange(len(counts)), counts)
    unit_splits = np.repeat(splits.first, counts) + ranks_within(counts)
    starts = layout.start_positions[sequences]
    ends = layout.context_token_counts[sequences]
    first_positions = np.maximum(starts, unit_splits * sizes.split_token_count)
    if sizes.window_token_count is not None:
        # The last query that still sees the split's last position.
        reach = (unit_splits + 1) * sizes.split_token_count - 1 + sizes.window_token_count
        ends = np.minimum(ends, reach)
    row_starts = layout.query_starts[sequences] + first_positions - starts
    return Units(sequences, unit_splits, row_starts, ends - first_positions)


def _split_items(
    units: Units, group_starts: Int64Array, sizes: PlanSizes
) -> tuple[Int32Array, Int32Array]:
    """Cuts the rows of each group into items: wide ones, and a narrow one where the rest fits."""
    row_ends = np.cumsum(units.row_counts)
    group_row_starts = (row_ends - units.row_counts)[group_starts]
    group_row_counts = np.diff(group_row_starts, append=row_ends[-1] if len(row_ends) else 0)
    wide = sizes.wide_row_count
    rests = group_row_counts % wide
    rests = np.where(rests <= sizes.narrow_row_count, rests, 0)
    in_wide = group_row_counts - rests
    wide_items = _items(
        units, group_starts, group_row_starts, in_wide, wide, split=sizes.split_token_count
    )
    narrow_items = _items(
        units,
        group_starts,
        group_row_starts + in_wide,
        rests,
        sizes.narrow_row_count,
        split=sizes.split_token_count,
    )
    return narrow_items, wide_items


def _items(
    units: Units,
    group_starts: Int64Array,
    row_starts: Int64Array,
    row_counts: Int64Array,
    item_row_count: int,
    *,
    split: int,
) -> Int32Array:
    counts = -(-row_counts // item_row_count)
    leaders = np.repeat(group_starts, counts)
    offsets = ranks_within(counts) * item_row_count
    items = np.empty((len(leaders), 5), np.int32)
    items[:, 0] = units.sequences[leaders]
    items[:, 1] = units.splits[leaders] * split
    items[:, 2] = items[:, 1] + split
    items[:, 3] = np.repeat(row_starts, counts) + offsets
    items[:, 4] = np.minimum(np.repeat(row_counts, counts) - offsets, item_row_count)
    return items


def _whole_items(
    layout: PassLayout, sizes: PlanSizes, *, row_start: int
) -> tuple[Int32Array, Int64Array]:
    """Items of the long queries, and their rows in the order of the items' row lists."""
    (sequences,) = np.nonzero(layout.query_token_counts >= sizes.long_query_row_count)
    row_counts = layout.query_token_counts[sequences]
    rows = np.repeat(layout.query_starts[sequences], row_counts) + ranks_within(row_counts)
    counts = -(-row_counts // sizes.whole_row_count)
    offsets = ranks_within(counts) * sizes.whole_row_count
    list_starts = row_start + np.cumsum(row_counts) - row_counts
    items = np.empty((len(offsets), 5), np.int32)
    items[:, 0] = np.repeat(sequences, counts)
    items[:, 1] = 0
    items[:, 2] = POSITION_MAX
    items[:, 3] = np.repeat(list_starts, counts) + offsets
    items[:, 4] = np.minimum(np.repeat(row_counts, counts) - offsets, sizes.whole_row_count)
    # The longest first: short ones then fill the gaps at the end.
    lengths = np.repeat(layout.start_positions[sequences], counts) + offsets
    return items[np.argsort(-lengths, kind="stable")], rows


def _reductions(
    split_rows: Int64Array, splits: Int64Array, whole_rows: Int64Array, row_count: int
) -> tuple[Int32Array, Int32Array]:
    """Which partials add up to each row; padding rows add up nothing."""
    split_count = int(splits.max()) + 1 if len(splits) else 1
    order = np.argsort(split_rows * split_count + splits, kind="stable")
    partial_counts = np.bincount(split_rows, minlength=row_count)
    ends = np.cumsum(partial_counts)
    reductions = np.empty((row_count, 3), np.int32)
    reductions[:, 0] = np.arange(row_count)
    reductions[:, 1] = ends - partial_counts
    reductions[:, 2] = ends
    if len(whole_rows):
        reductions = np.delete(reductions, whole_rows, axis=0)
    return reductions, order.astype(np.int32)


def _is_still_right(
    last_layout: PassLayout,
    last_splits: _Splits,
    layout: PassLayout,
    splits: _Splits,
    sizes: PlanSizes,
) -> bool:
    same_rows = layout.row_count == last_layout.row_count and all(
        np.array_equal(now, last)
        for now, last in (
            (layout.query_starts, last_layout.query_starts),
            (layout.query_token_counts, last_layout.query_token_counts),
        )
    )
    if not same_rows or layout.block_size != last_layout.block_size:
        return False
    if not splits.equals(last_splits) or not _sees_the_same(last_layout, layout):
        return False
    # Only complete splits are ever read for several sequences.
    block_counts = -(-splits.complete_end * sizes.split_token_count // layout.block_size)
    width = int(block_counts.max(initial=0))
    now, last = layout.block_tables[:, :width], last_layout.block_tables[:, :width]
    if now.shape != last.shape:
        return False
    moved = now != last
    return not (moved & (np.arange(width) < block_counts[:, None])).any()


def _sees_the_same(last_layout: PassLayout, layout: PassLayout) -> bool:
    """Whether every row still sees the splits that it saw: always so for one row per sequence."""
    if int(layout.query_token_counts.max(initial=0)) <= 1:
        return True
    return np.array_equal(layout.context_token_counts, last_layout.context_token_counts)


def _with_own_table(layout: PassLayout) -> PassLayout:
    return PassLayout(
        layout.block_tables.copy(),
        layout.query_starts.copy(),
        layout.query_token_counts.copy(),
        layout.context_token_counts.copy(),
        layout.row_count,
        layout.block_size,
        layout.block_count,
    )
