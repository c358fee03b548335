"""What one forward pass is asked to do, as plain data (no tensors, no protobuf)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from prefixd.worker.attention.batch import SequenceRows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that one pass computes.

    Attributes:
        token_ids: the tokens, at least one.
        start_position: position of the first of them in its sequence.
        tables: the sequence's whole block table of each KV group from position 0, at least up to
            the last token of this chunk; block 0 where a window group reads nothing any more.
        slots: where the K and V of each token go, one per token, in each KV group.
        logit_token_count: how many of the last tokens want logits: 0 for a prefill chunk that is
            not the last, 1 for sampling, ``len(token_ids)`` for prompt logprobs.
        lora_name: the LoRA adapter of the sequence; empty: none.
    """

    token_ids: Sequence[int]
    start_position: int
    tables: Sequence[Sequence[int]]
    slots: Sequence[Sequence[int]]
    logit_token_count: int
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``token_count`` slots of a block are copied to another, in every layer."""

    source_block_id: int
    target_block_id: int
    token_count: int


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What a pass reads and writes in the layers of one KV group.

    Attributes:
        slots: int64, shape (tokens,).
        sequences: one per chunk; their rows follow one another without a gap.
    """

    slots: NDArray[np.int64]
    sequences: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A flattened batch: the tokens of all sequences on one axis, in the order of the chunks.

    Attributes:
        token_ids, positions: int64, shape (tokens,).
        groups: one per KV group, alike but for slots and block tables.
        logit_rows: int64, the rows that want logits, ascending: chunk by chunk.
        copies: block copies executed before anything is written. No block is both a source and a
            target.
        lora_names: one per chunk, empty where it goes without adapter.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    groups: tuple[GroupRows, ...]
    logit_rows: NDArray[np.int64]
    copies: tuple[BlockCopy, ...] = ()
    lora_names: tuple[str, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens computed by this pass."""
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one row, and goes without adapter."""
        return len(self.groups[0].sequences) == self.token_count and not any(self.lora_names)


def flatten(chunks: Sequence[Chunk], copies: Sequence[BlockCopy] = ()) -> ForwardPass:
    """Lays chunks one behind the other.

    A chunk that reads a block which another chunk of the same pass writes is fine, in any order:
    in each layer every token of the pass is stored before any row attends.
    """
    counts = [len(chunk.token_ids) for chunk in chunks]
    for chunk, count in zip(chunks, counts, strict=True):
        assert count > 0, "a chunk holds at least one token"
        for slots in chunk.slots:
            assert count == len(slots), f"{count} tokens, {len(slots)} slots"
        assert 0 <= chunk.logit_token_count <= count, chunk.logit_token_count
    ends = list(accumulate(counts))
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    logit_counts = [chunk.logit_token_count for chunk in chunks]
    logit_starts = [end - count for end, count in zip(ends, logit_counts, strict=True)]
    return ForwardPass(
        token_ids=_flat(chunk.token_ids for chunk in chunks),
        positions=_runs([chunk.start_position for chunk in chunks], counts),
        groups=_group_rows(chunks, starts),
        logit_rows=_runs(logit_starts, logit_counts),
        copies=tuple(copies),
        lora_names=tuple(chunk.lora_name for chunk in chunks),
    )


def _group_rows(chunks: Sequence[Chunk], starts: Sequence[int]) -> tuple[GroupRows, ...]:
    groups = []
    by_group = zip(
        zip(*(chunk.tables for chunk in chunks), strict=True),
        zip(*(chunk.slots for chunk in chunks), strict=True),
        strict=True,
    )
    for tables, slots in by_group:
        sequences = tuple(
            SequenceRows(
                row, len(chunk.token_ids), chunk.start_position + len(chunk.token_ids), tuple(table)
            )
            for row, chunk, table in zip(starts, chunks, tables, strict=True)
        )
        groups.append(GroupRows(_flat(slots), sequences))
    return tuple(groups)


def _flat(parts: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """Numbers of all parts, one part behind the other."""
    return np.array(list(chain.from_iterable(parts)), np.int64)


def _runs(starts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """For each run the numbers from its start on, one run behind the other."""
    lengths = np.array(counts, np.int64)
    ends = np.cumsum(lengths)
    shifts = np.array(starts, np.int64) - (ends - lengths)
    numbers: NDArray[np.int64] = np.arange(sum(counts)) + np.repeat(shifts, lengths)
    return numbers
