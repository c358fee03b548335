"""The work of one pass as plain arrays: where its rows stand, and who reads which positions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd.kernels.tiling import SPLIT_TOKEN_COUNT

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

LONG_QUERY_ROW_COUNT = 256
"""A sequence with so many rows in a pass fills the device by itself and is not split."""

ITEM_FIELDS = ("table_row", "first_position", "end_position", "row_start", "row_count")
"""Columns of an item; rows ``row_start`` to ``row_start + row_count`` of the row list read it."""

REDUCTION_FIELDS = ("row", "partial_start", "partial_end")
"""Columns of a reduction: entries of the partial order that add up to the row."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """What a work list depends on beside its pass.

    Attributes:
        narrow_row_count, wide_row_count, whole_row_count: rows that fit in an item of each kind.
        split_token_count: positions per split.
        window_token_count: of the layers that it serves.
        long_query_row_count: sequences with at least so many rows are not split.
    """

    narrow_row_count: int
    wide_row_count: int
    whole_row_count: int
    split_token_count: int = SPLIT_TOKEN_COUNT
    window_token_count: int | None = None
    long_query_row_count: int = LONG_QUERY_ROW_COUNT

    def __post_init__(self) -> None:
        assert 1 <= self.narrow_row_count <= self.wide_row_count, self
        assert self.whole_row_count >= 1, self
        assert self.split_token_count >= 1, self
        assert self.window_token_count is None or self.window_token_count >= 1, self


class BlockIdOutOfRange(ValueError):
    """A block table names a block that the pool lacks."""

    def __init__(self, *, block_id: int, block_count: int) -> None:
        super().__init__(f"block table names block {block_id}, the pool has {block_count} blocks")
        self.block_id = block_id
        self.block_count = block_count


@dataclass(frozen=True, slots=True)
class PassLayout:
    """The sequences of one pass.

    Invariants: rows of the sequences do not overlap; rows that belong to no sequence are padding;
    every table reaches to its sequence's last position; block ids lie in the pool.

    Attributes:
        block_tables: int32 (sequences, blocks of the longest table), padded with block 0.
        query_starts: int64 (sequences,), first row of each.
        query_token_counts: int64 (sequences,), rows of each, at least 1.
        context_token_counts: int64 (sequences,), tokens of each once the pass has run; row i stands
            at position ``context - query tokens + i`` and sees every position up to its own.
        row_count: rows of the pass, padding included.
        block_size: slots per block.
        block_count: blocks of the pool.

    Raises:
        BlockIdOutOfRange: a table names a block that the pool lacks.
    """

    block_tables: Int32Array
    query_starts: Int64Array
    query_token_counts: Int64Array
    context_token_counts: Int64Array
    row_count: int
    block_size: int
    block_count: int

    def __post_init__(self) -> None:
        sequence_count = len(self.query_starts)
        assert self.block_tables.dtype == np.int32, self.block_tables.dtype
        assert self.block_tables.shape[:1] == (sequence_count,), self.block_tables.shape
        for counts in (self.query_starts, self.query_token_counts, self.context_token_counts):
            assert counts.shape == (sequence_count,), counts.shape
            assert counts.dtype == np.int64, counts.dtype
        if not sequence_count:
            return
        assert self.query_starts.min() >= 0, "rows are not negative"
        assert self.query_token_counts.min() > 0, "a sequence has at least one row"
        assert (self.query_starts + self.query_token_counts).max() <= self.row_count, "rows exist"
        assert (self.context_token_counts >= self.query_token_counts).all(), "rows are in context"
        token_count_max = self.block_tables.shape[1] * self.block_size
        assert self.context_token_counts.max() <= token_count_max, "tables cover their contexts"
        for block_id in (int(self.block_tables.min()), int(self.block_tables.max())):
            if not 0 <= block_id < self.block_count:
                raise BlockIdOutOfRange(block_id=block_id, block_count=self.block_count)

    @property
    def start_positions(self) -> Int64Array:
        """Position of each sequence's first row: int64 (sequences,)."""
        return self.context_token_counts - self.query_token_counts

    def positions(self) -> Int32Array:
        """Position of every row: int32 (rows,), 0 for padding."""
        positions = np.zeros(self.row_count, np.int32)
        ranks = ranks_within(self.query_token_counts)
        rows = np.repeat(self.query_starts, self.query_token_counts) + ranks
        positions[rows] = np.repeat(self.start_positions, self.query_token_counts) + ranks
        return positions


@dataclass(frozen=True, slots=True)
class WorkList:
    """Who reads what in one pass.

    Invariants: each row that is not padding stands either in split items, once for every split that
    it sees, or in one whole item; partial p is the result for entry p of ``rows``.

    Attributes:
        narrow_items: int32 (items, fields), split items of few rows.
        wide_items: int32 (items, fields), split items of many rows.
        whole_items: int32 (items, fields), items of many rows of one sequence that read all that
            these see; longest first.
        rows: int32 (listed rows,): rows of split items, then those of whole items.
        partial_count: how many of ``rows`` belong to split items.
        reductions: int32 (rows in split items and padding rows, fields).
        partial_order: int32 (partials,): grouped by row, each row's in order of position.
        sizes: what it was made for.
    """

    narrow_items: Int32Array
    wide_items: Int32Array
    whole_items: Int32Array
    rows: Int32Array
    partial_count: int
    reductions: Int32Array
    partial_order: Int32Array
    sizes: PlanSizes


def ranks_within(counts: Int64Array) -> Int64Array:
    """0 to ``counts[i] - 1`` for each i, one behind the other: int64 (sum of counts,)."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
