"""Decode rows of many sequences together: what they share of their tables is read once.

The block tables form a tree, for sequences share blocks from position 0 on. Rows are put in the
order of that tree, so each stretch of it belongs to consecutive rows and is one matrix product for
all of them. Scores land in one (rows, positions) matrix, so one softmax serves every row, and no
partial results have to be merged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.attention.pages import ReadBuffer, Stretch, split_stretches
from prefixd.worker.attention.seam import LayerTraits


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of KV and the rows [first, end) that read it, in the order of the tree."""

    first_row: int
    end_row: int
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class DecodeCascade:
    """The decode rows of one pass.

    Attributes:
        rows: int64 (decode rows,), their rows in the pass, in the order of the tree.
        branches: in any order; together they give each row its whole context once.
        context_token_count_max: of the longest row.
    """

    rows: Tensor
    branches: tuple[Branch, ...]
    context_token_count_max: int
    _buffer: ReadBuffer = field(default_factory=ReadBuffer)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """Attends with the decode rows over their whole contexts (no window).

        Args:
            query: (rows of the pass, query heads, width).
            layer: the layer's pool.
            traits: of the layer.

        Returns:
            (decode rows, query heads, value width), in the order of ``rows``.
        """
        assert traits.window_token_count is None, traits
        row_count, kv_head_count = len(self.rows), layer.head_count
        # (kv heads, rows, query heads of each, width)
        packed = query[self.rows].view(row_count, kv_head_count, -1, query.shape[-1])
        packed = packed.transpose(0, 1).contiguous()
        weights = self._weights(packed, layer, traits).to(query.dtype)
        output = query.new_zeros((*packed.shape[:3], layer.value_width))
        for branch in self.branches:
            rows = slice(branch.first_row, branch.end_row)
            stretch = branch.stretch
            part = weights[:, rows, :, stretch.first_position : stretch.end_position]
            values = self._buffer.values(layer, stretch.slots, query.dtype)
            product = torch.matmul(part.flatten(1, 2), values.transpose(0, 1))
            output[:, rows] += product.view(*part.shape[:3], -1)
        return output.transpose(0, 1).flatten(1, 2)

    def _weights(self, packed: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """Softmax of the scores, zero beyond a row's context; the last axis is the positions."""
        shape = (*packed.shape[:3], self.context_token_count_max)
        scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=packed.device)
        for branch in self.branches:
            rows = slice(branch.first_row, branch.end_row)
            part = packed[:, rows]
            stretch = branch.stretch
            keys = self._buffer.keys(layer, stretch.slots, packed.dtype)
            product = torch.matmul(part.flatten(1, 2), keys.permute(1, 2, 0))
            part_scores = product.float().mul_(traits.scaling)
            if traits.softcap is not None:
                part_scores = traits.softcap * torch.tanh(part_scores / traits.softcap)
            positions = slice(stretch.first_position, stretch.end_position)
            scores[:, rows, :, positions] = part_scores.view(*part.shape[:3], -1)
        if traits.sinks is not None:
            sinks = traits.sinks.float().view(packed.shape[0], 1, -1, 1)
            scores = torch.cat([scores, sinks.expand(-1, packed.shape[1], -1, -1)], dim=-1)
        return torch.softmax(scores, dim=-1)[..., : self.context_token_count_max]


def build_cascade(
    sequences: Sequence[SequenceRows], *, block_size: int, device: torch.device
) -> DecodeCascade:
    """Finds what the sequences share.

    Args:
        sequences: one query row each, at least one.
        block_size: slots per block.
        device: of the pool.
    """
    assert all(rows.query_token_count == 1 for rows in sequences)
    ordered = sorted(
        sequences, key=lambda rows: rows.block_ids[: rows.context_token_count // block_size]
    )
    tree = _Tree(ordered, block_size=block_size, device=device)
    return DecodeCascade(
        rows=torch.tensor([rows.query_start for rows in ordered], device=device),
        branches=tuple(tree.branches(0, len(ordered), 0)),
        context_token_count_max=max(rows.context_token_count for rows in ordered),
    )


class _Tree:
    """Sequences in lexical order of their full blocks, so a common prefix is a range of rows."""

    def __init__(
        self, ordered: Sequence[SequenceRows], *, block_size: int, device: torch.device
    ) -> None:
        self._tables = [np.asarray(rows.block_ids, dtype=np.int64) for rows in ordered]
        self._contexts = [rows.context_token_count for rows in ordered]
        self._block_size = block_size
        self._device = device

    def branches(self, first_row: int, end_row: int, first_block: int) -> Iterator[Branch]:
        """Branches of rows that agree on all blocks before ``first_block``."""
        row = first_row
        while row < end_row:
            sharing = self._end_of_sharing(row, end_row, first_block)
            first_position = first_block * self._block_size
            if sharing == row + 1:
                yield from self._stretches(row, sharing, first_position, self._contexts[row])
            else:
                shared_end = self._shared_block_count(row, sharing - 1)
                shared_position = shared_end * self._block_size
                yield from self._stretches(row, sharing, first_position, shared_position)
                yield from self.branches(row, sharing, shared_end)
            row = sharing

    def _full_block_count(self, row: int) -> int:
        return self._contexts[row] // self._block_size

    def _end_of_sharing(self, row: int, end_row: int, block: int) -> int:
        """Behind the last row that has the same full block at index ``block``."""
        end = row + 1
        if block < self._full_block_count(row):
            # Later rows in lexical order are no shorter as long as they agree.
            while end < end_row and self._tables[end][block] == self._tables[row][block]:
                end += 1
        return end

    def _shared_block_count(self, first_row: int, last_row: int) -> int:
        """Leading full blocks that are equal; in lexical order the rows between agree on them."""
        length = min(self._full_block_count(first_row), self._full_block_count(last_row))
        first, last = self._tables[first_row][:length], self._tables[last_row][:length]
        differing = np.flatnonzero(first != last)
        return int(differing[0]) if len(differing) else length

    def _stretches(
        self, first_row: int, end_row: int, first_position: int, end_position: int
    ) -> Iterator[Branch]:
        if first_position == end_position:
            return
        for stretch in split_stretches(
            self._tables[first_row],
            first_position=first_position,
            end_position=end_position,
            block_size=self._block_size,
            device=self._device,
        ):
            yield Branch(first_row, end_row, stretch)
