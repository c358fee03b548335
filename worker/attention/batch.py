"""Where the rows of a pass stand and which KV they read: built once per pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
        block_tables: int64 (sequences, blocks of the longest table), padded with block 0.
        block_size: slots per block.
        group_index: of the KV group whose layers read it.
    """

    slots: Tensor
    sequences: tuple[SequenceRows, ...]
    block_tables: Tensor
    block_size: int
    group_index: int = 0

    @property
    def row_count(self) -> int:
        """Rows of the pass, padding included."""
        return self.slots.shape[0]

    def context_slots(self, index: int) -> Tensor:
        """Slots of all positions that sequence ``index`` reads: int64 (context tokens,)."""
        rows = self.sequences[index]
        device = self.block_tables.device
        positions = torch.arange(rows.context_token_count, device=device)
        table = self.block_tables[index]
        return table[positions // self.block_size] * self.block_size + positions % self.block_size


def build_batch(
    slots: Tensor, sequences: Sequence[SequenceRows], *, block_size: int, group_index: int = 0
) -> AttentionBatch:
    """Packs the block tables of the sequences into one tensor beside ``slots``, on its device."""
    block_count_max = max((len(rows.block_ids) for rows in sequences), default=0)
    table = torch.zeros((len(sequences), block_count_max), dtype=torch.int64)
    for index, rows in enumerate(sequences):
        table[index, : len(rows.block_ids)] = torch.tensor(rows.block_ids, dtype=torch.int64)
    return AttentionBatch(slots, tuple(sequences), table.to(slots.device), block_size, group_index)
