"""What one forward pass is asked to do, as plain data (no tensors, no protobuf)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixd.worker.attention.batch import SequenceRows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that one pass computes.

    Attributes:
        token_ids: the tokens, at least one.
        start_position: position of the first of them in its sequence.
        block_ids: the sequence's whole block table from position 0, at least up to the last token
            of this chunk.
        slots: where the K and V of each token go, one per token, as the plan said.
        logit_token_count: how many of the last tokens want logits: 0 for a prefill chunk that is
            not the last, 1 for sampling, ``len(token_ids)`` for prompt logprobs.
        lora_name: the LoRA adapter of the sequence; empty: none.
    """

    token_ids: Sequence[int]
    start_position: int
    block_ids: Sequence[int]
    slots: Sequence[int]
    logit_token_count: int
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``token_count`` slots of a block are copied to another, in every layer."""

    source_block_id: int
    target_block_id: int
    token_count: int


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A flattened batch: the tokens of all sequences on one axis, in the order of the chunks.

    Attributes:
        token_ids, positions, slots: int64, shape (tokens,).
        sequences: one per chunk; their rows follow one another without a gap.
        logit_rows: int64, the rows that want logits, ascending: chunk by chunk.
        copies: block copies executed before anything is written. No block is both a source and a
            target.
        lora_names: one per chunk, empty where it goes without adapter.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    sequences: tuple[SequenceRows, ...]
    logit_rows: NDArray[np.int64]
    copies: tuple[BlockCopy, ...] = ()
    lora_names: tuple[str, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens computed by this pass."""
        return len(self.token_ids)


def flatten(chunks: Sequence[Chunk], copies: Sequence[BlockCopy] = ()) -> ForwardPass:
    """Lays chunks one behind the other.

    A chunk that reads a block which another chunk of the same pass writes is fine, in any order:
    in each layer every token of the pass is stored before any row attends.
    """
    sequences: list[SequenceRows] = []
    positions: list[NDArray[np.int64]] = []
    logit_rows: list[NDArray[np.int64]] = []
    row = 0
    for chunk in chunks:
        count = len(chunk.token_ids)
        assert count > 0, "a chunk holds at least one token"
        assert count == len(chunk.slots), f"{count} tokens, {len(chunk.slots)} slots"
        assert 0 <= chunk.logit_token_count <= count, chunk.logit_token_count
        end = chunk.start_position + count
        sequences.append(SequenceRows(row, count, end, tuple(chunk.block_ids)))
        positions.append(np.arange(chunk.start_position, end, dtype=np.int64))
        logit_rows.append(np.arange(row + count - chunk.logit_token_count, row + count))
        row += count
    return ForwardPass(
        token_ids=_concatenate([np.asarray(c.token_ids, dtype=np.int64) for c in chunks]),
        positions=_concatenate(positions),
        slots=_concatenate([np.asarray(c.slots, dtype=np.int64) for c in chunks]),
        sequences=tuple(sequences),
        logit_rows=_concatenate(logit_rows),
        copies=tuple(copies),
        lora_names=tuple(chunk.lora_name for chunk in chunks),
    )


def _concatenate(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, np.int64)
