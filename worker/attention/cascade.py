"""Decode rows of many sequences together: what they share of their tables is read once.

The block tables form a tree, for sequences share blocks from position 0 on. Rows are put in the
order of that tree, so each stretch of it belongs to consecutive rows and is one matrix product for
all of them. What is left, the short ends that rows have for themselves, is padded to one length and
makes one product, too. Scores land in one matrix with a line per row, so one softmax serves every
row, and no partial results have to be merged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.attention.pages import Memory, ReadBuffer, Stretch, split_stretches
from prefixd.worker.attention.seam import LayerTraits

TWIG_TOKEN_COUNT_MAX = 256
"""A row's own end is worth a product of its own where it is longer; shorter ones are padded."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of KV and the rows [first, end) that read it, in the order of the tree."""

    first_row: int
    end_row: int
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class Twigs:
    """The short ends of contexts that rows read alone, one per row, padded to one length.

    Attributes:
        slots: int64 (decode rows * length,), row by row; padding is the row's own first slot, whose
            K and V are finite whenever the row's are.
        is_padding: bool (decode rows, length).
    """

    slots: Tensor
    is_padding: Tensor

    @property
    def length(self) -> int:
        """Slots per row."""
        return self.is_padding.shape[1]


@dataclass(frozen=True, slots=True)
class DecodeCascade:
    """The decode rows of one pass.

    Invariant: branches and twigs together give each row its whole context once.

    Attributes:
        rows: int64 (decode rows,), their rows in the pass, in the order of the tree.
        branches: what several rows share, and what is long; in any order.
        twigs: the rest.
    """

    rows: Tensor
    branches: tuple[Branch, ...]
    twigs: Twigs
    _buffer: ReadBuffer = field(default_factory=ReadBuffer)
    _scores: Memory = field(default_factory=Memory)
    _softmax: Memory = field(default_factory=Memory)

    @property
    def branch_column_count(self) -> int:
        """Columns of the scores that branches fill, by position; those of twigs come behind."""
        return max((branch.stretch.end_position for branch in self.branches), default=0)

    @property
    def has_gaps(self) -> bool:
        """Whether branches leave some of their columns free in some rows."""
        filled = sum(
            (branch.end_row - branch.first_row) * branch.stretch.token_count
            for branch in self.branches
        )
        return filled < len(self.rows) * self.branch_column_count

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
        packed = query[self.rows].mul_(traits.scaling)
        packed = packed.view(row_count, kv_head_count, -1, query.shape[-1])
        packed = packed.transpose(0, 1).contiguous()
        weights = self._weights(packed, layer, traits).to(query.dtype)
        output = self._twig_output(weights[..., self.branch_column_count :], layer)
        for branch in self.branches:
            rows = slice(branch.first_row, branch.end_row)
            stretch = branch.stretch
            part = weights[:, rows, :, stretch.first_position : stretch.end_position]
            values = self._buffer.values(layer, stretch.slots, query.dtype)
            product = torch.matmul(part.flatten(1, 2), values.transpose(0, 1))
            output[:, rows] += product.view(*part.shape[:3], -1)
        return output.transpose(0, 1).flatten(1, 2)

    def _weights(self, packed: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """Softmax of the scores, zero where a row sees nothing: (kv heads, rows, heads, columns)"""
        twig_start = self.branch_column_count
        shape = torch.Size((*packed.shape[:3], twig_start + self.twigs.length))
        scores = self._scores.tensor(shape, torch.float32, packed.device)
        if self.has_gaps:
            scores.fill_(-torch.inf)
        for branch in self.branches:
            rows = slice(branch.first_row, branch.end_row)
            columns = slice(branch.stretch.first_position, branch.stretch.end_position)
            keys = self._buffer.keys(layer, branch.stretch.slots, packed.dtype)
            _multiply(
                packed[:, rows].flatten(1, 2),
                keys.permute(1, 2, 0),
                into=scores[:, rows].flatten(1, 2)[..., columns],
            )
        scores[..., twig_start:] = self._twig_scores(packed, layer)
        if traits.softcap is not None:
            hidden = scores.isneginf()
            scores.div_(traits.softcap).tanh_().mul_(traits.softcap)
            scores.masked_fill_(hidden, -torch.inf)
        weights = self._softmax.tensor(shape, torch.float32, packed.device)
        if traits.sinks is None:
            return torch.softmax(scores, dim=-1, out=weights)
        sinks = traits.sinks.float().view(packed.shape[0], 1, -1, 1)
        scores = torch.cat([scores, sinks.expand(-1, packed.shape[1], -1, -1)], dim=-1)
        return torch.softmax(scores, dim=-1)[..., : shape[-1]]

    def _twig_scores(self, packed: Tensor, layer: LayerKv) -> Tensor:
        """Products, minus infinity at padding: (kv heads, rows, heads, length)."""
        keys = self._buffer.keys(layer, self.twigs.slots, packed.dtype)
        products = torch.matmul(packed.transpose(0, 1), self._by_head(keys).transpose(2, 3))
        products.masked_fill_(self.twigs.is_padding[:, None, None], -torch.inf)
        return products.transpose(0, 1)

    def _twig_output(self, weights: Tensor, layer: LayerKv) -> Tensor:
        """Sums (kv heads, rows, heads, length) over V: (kv heads, rows, heads, value width)."""
        values = self._buffer.values(layer, self.twigs.slots, weights.dtype)
        return torch.matmul(weights.transpose(0, 1), self._by_head(values)).transpose(0, 1)

    def _by_head(self, twigs: Tensor) -> Tensor:
        """(decode rows * length, kv heads, width) as (decode rows, kv heads, length, width).

        Contiguous, for a product would copy it otherwise, and turn it around element by element.
        """
        by_row = twigs.view(len(self.rows), self.twigs.length, *twigs.shape[1:])
        return by_row.transpose(1, 2).contiguous()


def _multiply(left: Tensor, right: Tensor, *, into: Tensor) -> None:
    """Batched matrix product into a part of a larger tensor, of the same or a wider dtype."""
    if left.dtype == into.dtype:
        torch.matmul(left, right, out=into)
    else:
        into.copy_(torch.matmul(left, right))


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
        twigs=tree.twigs(),
    )


class _Tree:
    """Sequences in lexical order of their full blocks, so a common prefix is a range of rows.

    Invariant: `_twig_starts` tells of each row where its twig begins; its branches end there.
    """

    def __init__(
        self, ordered: Sequence[SequenceRows], *, block_size: int, device: torch.device
    ) -> None:
        self._tables = [np.asarray(rows.block_ids, dtype=np.int64) for rows in ordered]
        self._contexts = np.array([rows.context_token_count for rows in ordered], np.int64)
        self._twig_starts = self._contexts.copy()
        self._block_size = block_size
        self._device = device

    def branches(self, first_row: int, end_row: int, first_block: int) -> Iterator[Branch]:
        """Branches of rows that agree on all blocks before ``first_block``."""
        row = first_row
        while row < end_row:
            sharing = self._end_of_sharing(row, end_row, first_block)
            first_position = first_block * self._block_size
            if sharing == row + 1 and self._contexts[row] - first_position <= TWIG_TOKEN_COUNT_MAX:
                self._twig_starts[row] = first_position
            elif sharing == row + 1:
                yield from self._stretches(row, sharing, first_position, int(self._contexts[row]))
            else:
                shared_end = self._shared_block_count(row, sharing - 1)
                shared_position = shared_end * self._block_size
                yield from self._stretches(row, sharing, first_position, shared_position)
                yield from self.branches(row, sharing, shared_end)
            row = sharing

    def twigs(self) -> Twigs:
        """What the branches, which must be complete, leave."""
        offsets = np.arange(int((self._contexts - self._twig_starts).max()))
        positions = self._twig_starts[:, None] + offsets
        is_padding = positions >= self._contexts[:, None]
        positions[is_padding] = 0
        size = self._block_size
        slots = np.empty_like(positions)
        for line, of_row, table in zip(slots, positions, self._tables, strict=True):
            line[:] = table[of_row // size] * size + of_row % size
        return Twigs(
            torch.from_numpy(slots.reshape(-1)).to(self._device),
            torch.from_numpy(is_padding).to(self._device),
        )

    def _full_block_count(self, row: int) -> int:
        return int(self._contexts[row]) // self._block_size

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
