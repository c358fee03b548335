"""Where the rows of a pass stand and which KV they read: built once per pass."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in the flattened token axis of a pass.

    Row ``query_start + i`` is the token at position
    ``context_token_count - query_token_count + i`` and attends to every position up to its own.
    """

    query_start: int
    query_token_count: int
    context_token_count: int
    block_ids: tuple[int, ...]

    @property
    def start_position(self) -> int:
        """Position of the first row."""
        return self.context_token_count - self.query_token_count

    @property
    def query_rows(self) -> slice:
        """The rows in the flattened token axis."""
        return slice(self.query_start, self.query_start + self.query_token_count)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one pass.

    Invariants: the rows of the sequences follow one another from row 0 without a gap; rows behind
    the last sequence are padding, whose slots lie in block 0; block tables reach at least to the
    last position read.

    Attributes:
        slots: int64 (rows,), where each row's K and V are stored.
        sequences: in row order.
        block_tables: int32 (sequences, blocks of the longest table), padded with block 0; on the
            host, where passes are planned.
        block_size: slots per block.
        group_index: of the KV group whose layers read it.
    """

    slots: Tensor
    sequences: tuple[SequenceRows, ...]
    block_tables: NDArray[np.int32]
    block_size: int
    group_index: int = 0

    @property
    def row_count(self) -> int:
        """Rows of the pass, padding included."""
        return self.slots.shape[0]

    def context_slots(self, index: int) -> Tensor:
        """Slots of all positions that sequence ``index`` reads: int64 (context tokens,)."""
        rows = self.sequences[index]
        positions = np.arange(rows.context_token_count)
        blocks = self.block_tables[index, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        return torch.from_numpy(slots).to(self.slots.device)


def pack_tables(sequences: Sequence[SequenceRows]) -> NDArray[np.int32]:
    """The block tables of sequences: int32 (sequences, blocks of the longest), 0 behind the end."""
    block_count_max = max((len(rows.block_ids) for rows in sequences), default=0)
    tables = np.zeros((len(sequences), block_count_max), np.int32)
    # numpy takes five times as long to turn a tuple into an array.
    memory = tables.data.cast("B") if tables.size else memoryview(b"")
    for index, rows in enumerate(sequences):
        offset = index * block_count_max * tables.itemsize
        struct.pack_into(f"{len(rows.block_ids)}i", memory, offset, *rows.block_ids)
    return tables
