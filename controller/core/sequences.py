"""Open sequences: their positions in columns, their tokens and their block tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from prefixd.controller.core.hashing import ExtraKeys
from prefixd.controller.core.hints import NO_HINT
from prefixd.controller.core.identity import SequenceKeys
from prefixd.controller.core.messages import (
    Handle,
    Identity,
    IntArray,
    SequenceId,
)
from prefixd.controller.core.node import ChildKey, Lane, Node
from prefixd.controller.core.window_blocks import WindowPlace, WindowTable

TOKEN_BYTES = 4
"""Bytes of a packed token id."""
_ROWS_FIRST = 64
_Value = TypeVar("_Value", bound=np.generic)


class Sequence:
    """One open sequence and its block table.

    The table is the path from the root to `leaf` (`indexed_count` blocks; a place in `twins` has
    the sequence's own block instead of the indexed one), then `private_block_ids`. Positions stand
    in row `row` of the columns. `full_tokens` packs the known tokens of all full blocks; those of
    the last partial block stand in the tail column. A fork may have taken over the leading tokens
    of a block that is indexed: it is the first private block then, and `borrowed` is its lane.
    `window_tables` maps a window group to its table; `window_place` is where the first
    `window_entered_count` blocks end, which are full.

    Invariants: a path consists of whole nodes; an uncacheable sequence publishes and
    matches nothing more, and has at most the path of before; a borrowed lane is one block long, the
    place behind the path, and counts the sequence as a holder.
    """

    __slots__ = (
        "borrowed",
        "cached_count",
        "full_tokens",
        "handle",
        "identity",
        "indexed_count",
        "keys",
        "leaf",
        "lost_count",
        "model_version",
        "preemption_count",
        "private_block_ids",
        "recomputed_count",
        "retention_hint",
        "row",
        "sequence_id",
        "skip_cache_read",
        "twins",
        "uncacheable",
        "window_entered_count",
        "window_place",
        "window_tables",
    )

    def __init__(
        self,
        keys: SequenceKeys,
        *,
        handle: Handle,
        sequence_id: SequenceId,
        identity: Identity,
        row: int,
        model_version: str,
    ) -> None:
        self.handle = handle
        self.sequence_id = sequence_id
        self.identity = identity
        self.preemption_count = 0
        self.skip_cache_read = False
        self.retention_hint = NO_HINT
        self.keys = keys
        self.row = row
        self.model_version = model_version
        self.uncacheable = False
        self.leaf: Node | None = None
        self.indexed_count = 0
        self.twins: dict[int, int] = {}
        self.private_block_ids: array[int] = array("q")
        self.borrowed: Lane | None = None
        self.full_tokens = bytearray()
        self.cached_count = 0
        self.recomputed_count = 0
        self.lost_count = 0
        self.window_tables: dict[int, WindowTable] = {}
        self.window_place: WindowPlace | None = None
        self.window_entered_count = 0

    @property
    def block_count(self) -> int:
        """Blocks in the table."""
        return self.indexed_count + len(self.private_block_ids)

    def varied_keys(self, block_index: int) -> ExtraKeys:
        """Return the extra keys that only this block has."""
        return self.keys.varied_keys.get(block_index, ())

    def child_key(self, block_index: int, *, block_bytes: int) -> ChildKey:
        """Return what a node that begins with this full block is found by."""
        start = block_index * block_bytes
        tokens = bytes(self.full_tokens[start : start + block_bytes])
        return (tokens, self.varied_keys(block_index))

    def path(self) -> Iterator[tuple[Node, int]]:
        """Walk the path from the leaf up: each node with the table index of its first block."""
        end = self.indexed_count
        node = self.leaf
        while end > 0:
            assert node is not None
            start = end - node.block_count
            yield node, start
            node = node.parent if isinstance(node.parent, Node) else None
            end = start

    def table(self) -> IntArray:
        """Return the block table."""
        parts = [array("q", self.private_block_ids)]
        for node, start in self.path():
            own = self.twins.get(start) if self.twins else None
            parts.append(node.lane.block_ids if own is None else array("q", [own]))
        return np.concatenate([np.array(part, dtype=np.int64) for part in reversed(parts)])


class SequenceColumns:
    """Positions of all open sequences, one row each; rows are reused.

    `known`, `scheduled`, `written`: token counts; `capacity`: slots of the table;
    `planned_step_id`: the last step that scheduled positions; `cut`: the sequence lost positions to
    a failed step and needs an extend; `shares_tail`: the block of the first position that may
    still be written is, or was, shared with a fork; `tail`: known tokens of the last partial block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.row_count = 0
        self.known: IntArray = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.scheduled: IntArray = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.written: IntArray = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.capacity: IntArray = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.planned_step_id: IntArray = np.zeros(_ROWS_FIRST, dtype=np.int64)
        self.cut: npt.NDArray[np.bool_] = np.zeros(_ROWS_FIRST, dtype=np.bool_)
        self.shares_tail: npt.NDArray[np.bool_] = np.zeros(_ROWS_FIRST, dtype=np.bool_)
        self.tail: npt.NDArray[np.uint32] = np.zeros((_ROWS_FIRST, block_size), dtype="<u4")
        self._free_rows: list[int] = []

    def _grow(self) -> None:
        self.known = _doubled(self.known)
        self.scheduled = _doubled(self.scheduled)
        self.written = _doubled(self.written)
        self.capacity = _doubled(self.capacity)
        self.planned_step_id = _doubled(self.planned_step_id)
        self.cut = _doubled(self.cut)
        self.shares_tail = _doubled(self.shares_tail)
        self.tail = _doubled(self.tail)

    def take_row(self) -> int:
        """Return a cleared row for a new sequence."""
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            if self.row_count == len(self.known):
                self._grow()
            row = self.row_count
            self.row_count += 1
        self.known[row] = self.scheduled[row] = self.written[row] = self.capacity[row] = 0
        self.planned_step_id[row] = 0
        self.cut[row] = self.shares_tail[row] = False
        return row

    def give_row(self, row: int) -> None:
        """Give back the row of a closed sequence."""
        self.known[row] = self.scheduled[row] = self.written[row] = 0
        self._free_rows.append(row)

    def add_tokens(self, sequence: Sequence, token_ids: npt.NDArray[np.uint32]) -> None:
        """Append known tokens: full blocks to the sequence's tokens, the rest to its tail."""
        count = len(token_ids)
        if count == 0:
            return
        row = sequence.row
        size = self.block_size
        known = int(self.known[row])
        self.known[row] = known + count
        tail_count = known % size
        if tail_count + count < size:
            self.tail[row, tail_count : tail_count + count] = token_ids
            return
        joined = (
            np.concatenate((self.tail[row, :tail_count], token_ids)) if tail_count else token_ids
        )
        full_count = (len(joined) // size) * size
        sequence.full_tokens += joined[:full_count].astype("<u4", copy=False).data
        rest = joined[full_count:]
        self.tail[row, : len(rest)] = rest

    def take_over_tokens(self, child: Sequence, parent: Sequence, *, token_count: int) -> None:
        """Give a fork its parent's first known tokens; the child knows none yet."""
        full_count = token_count // self.block_size
        split_byte = full_count * self.block_size * TOKEN_BYTES
        child.full_tokens = parent.full_tokens[:split_byte]
        rest = token_count % self.block_size
        if full_count == int(self.known[parent.row]) // self.block_size:
            self.tail[child.row, :rest] = self.tail[parent.row, :rest]
        else:
            packed = bytes(parent.full_tokens[split_byte : split_byte + rest * TOKEN_BYTES])
            self.tail[child.row, :rest] = np.frombuffer(packed, dtype="<u4")
        self.known[child.row] = token_count

    def known_tokens(self, sequence: Sequence) -> bytes:
        """Return all known tokens, packed."""
        row = sequence.row
        tail_count = int(self.known[row]) % self.block_size
        return bytes(sequence.full_tokens) + pack_tokens(self.tail[row, :tail_count])


def _doubled(column: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
    return np.concatenate((column, np.zeros_like(column)))


def pack_tokens(token_ids: npt.NDArray[np.uint32]) -> bytes:
    """Return token ids as four little-endian bytes each."""
    return token_ids.astype("<u4", copy=False).tobytes()
