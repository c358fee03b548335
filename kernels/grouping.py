"""Finds sequences that read the same blocks: any tree of shared prefixes, without being told of it.

A unit is a pair of a sequence and a split of its context. Units of the same complete split whose
blocks are the same form a group, whose rows read that split together.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd.kernels.work_list import Int32Array, Int64Array, PassLayout

PAIRS_AT_ONCE = 512
"""Pairs of splits compared at a time, so that what is compared stays in the cache."""


@dataclass(frozen=True, slots=True)
class Units:
    """Pairs of a sequence and a split that it reads: int64 (units,) each.

    Attributes:
        sequences: index of the sequence in the pass.
        splits: index of the split.
        row_starts, row_counts: the sequence's rows that see something of the split.
    """

    sequences: Int64Array
    splits: Int64Array
    row_starts: Int64Array
    row_counts: Int64Array

    def reordered(self, order: Int64Array) -> "Units":
        """The same units in another order."""
        return Units(
            self.sequences[order],
            self.splits[order],
            self.row_starts[order],
            self.row_counts[order],
        )


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which units belong together.

    Attributes:
        order: int64 (units,), the units so that those of a group stand side by side.
        group_starts: int64 (groups,), where in the order each group begins, ascending.
    """

    order: Int64Array
    group_starts: Int64Array


def group_units(units: Units, layout: PassLayout, split_token_count: int) -> Grouping:
    """Puts units side by side that read the same blocks."""
    ends = (units.splits + 1) * split_token_count
    is_complete = ends <= layout.context_token_counts[units.sequences]
    # Blocks stand in one chain, so equal last blocks nearly always mean equal splits; what is
    # equal in truth is decided below.
    columns = np.minimum((ends - 1) // layout.block_size, layout.block_tables.shape[1] - 1)
    last_blocks = layout.block_tables[units.sequences, columns].astype(np.int64)
    # Negative keys are nobody else's.
    alone = -1 - np.arange(len(ends))
    keys = np.where(is_complete, (units.splits << 32) | last_blocks, alone)
    order = np.argsort(keys, kind="stable")
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.diff(keys[order]) != 0
    starts = np.flatnonzero(begins)
    joined = np.flatnonzero(~begins)
    if len(joined):
        leaders = order[starts[np.cumsum(begins)[joined] - 1]]
        is_same = _read_the_same(units, order[joined], leaders, layout, split_token_count)
        if not is_same.all():
            return _set_apart(order, begins, joined[~is_same])
    return Grouping(order, starts)


def _set_apart(order: Int64Array, begins: NDArray[np.bool_], apart: Int64Array) -> Grouping:
    """Takes units out of the group that they only seemed to belong to, each for itself."""
    stays = np.ones(len(order), np.bool_)
    stays[apart] = False
    alone = np.arange(len(order) - len(apart), len(order))
    return Grouping(
        np.concatenate([order[stays], order[apart]]),
        np.concatenate([np.flatnonzero(begins[stays]), alone]),
    )


def _read_the_same(
    units: Units,
    left: Int64Array,
    right: Int64Array,
    layout: PassLayout,
    split_token_count: int,
) -> NDArray[np.bool_]:
    """Whether units of the same complete split read the same blocks in it: bool (pairs,)."""
    left_sequences, right_sequences = units.sequences[left], units.sequences[right]
    splits = units.splits[left]
    blocks_per_split = split_token_count // layout.block_size
    table = layout.block_tables
    if split_token_count % layout.block_size == 0:
        # Whole sections of a table are gathered much faster than its entries.
        section_count = table.shape[1] // blocks_per_split
        sections = np.ascontiguousarray(table[:, : section_count * blocks_per_split])
        return _equal_rows(
            sections.reshape(-1, blocks_per_split),
            left_sequences * section_count + splits,
            right_sequences * section_count + splits,
        )
    # Where the last block reaches into the next split, the block behind it may be compared in vain:
    # a difference there costs sharing, nothing else.
    first_blocks = splits * split_token_count // layout.block_size
    columns = first_blocks[:, None] + np.arange(blocks_per_split + 2)
    columns = np.minimum(columns, table.shape[1] - 1)
    left_blocks = table[left_sequences[:, None], columns]
    right_blocks = table[right_sequences[:, None], columns]
    same: NDArray[np.bool_] = (left_blocks == right_blocks).all(axis=1)
    return same


def _equal_rows(rows: Int32Array, left: Int64Array, right: Int64Array) -> NDArray[np.bool_]:
    """Whether ``rows[left[i]]`` equals ``rows[right[i]]``: bool (pairs,)."""
    equal = np.empty(len(left), np.bool_)
    for start in range(0, len(left), PAIRS_AT_ONCE):
        pairs = slice(start, start + PAIRS_AT_ONCE)
        same = rows.take(left[pairs], axis=0) == rows.take(right[pairs], axis=0)
        same.all(axis=1, out=equal[pairs])
    return equal
