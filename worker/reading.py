"""What is wanted of a pass's logits, and how it is read from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.worker.sampling import Draw, sample


@dataclass(frozen=True, slots=True)
class LogitRead:
    """What is wanted of the logits of one chunk.

    Attributes:
        target_token_ids: for the chunk's first rows of logits, one after the other, the token whose
            log probability is wanted.
        draws: for the chunk's last rows, the tokens to choose; a row may serve many.
        top_count: how many of the last row's likeliest tokens are wanted.
    """

    target_token_ids: tuple[int, ...] = ()
    draws: tuple[tuple[Draw, ...], ...] = ()
    top_count: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class LogitReading:
    """What the logits of one chunk told.

    Attributes:
        target_logprobs: natural logarithms of the targets' probabilities, rounded to float32.
        token_ids: the chosen tokens, in the shape of the draws.
        top: the last row's likeliest tokens, the likeliest first.
    """

    target_logprobs: tuple[float, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    top: tuple[Candidate, ...] = ()


def read_logits(
    logits: Tensor, row_counts: Sequence[int], reads: Sequence[LogitRead]
) -> list[LogitReading]:
    """Reads the logits of several chunks.

    Args:
        logits: float32 (rows, vocabulary), the rows of chunk after chunk.
        row_counts: how many rows each chunk has.
        reads: what is wanted of each.
    """
    assert logits.shape[0] == sum(row_counts), (logits.shape, row_counts)
    chunks = torch.split(logits, list(row_counts))
    tokens = iter(_sample_all(logits, row_counts, reads))
    return [
        LogitReading(
            target_logprobs=_target_logprobs(chunk, read.target_token_ids),
            token_ids=tuple(tuple(next(tokens) for _ in row) for row in read.draws),
            top=_top(chunk, read.top_count),
        )
        for chunk, read in zip(chunks, reads, strict=True)
    ]


def _sample_all(logits: Tensor, row_counts: Sequence[int], reads: Sequence[LogitRead]) -> list[int]:
    """All chosen tokens, chunk by chunk and row by row: greedy ones cost one argmax in all."""
    rows: list[int] = []
    draws: list[Draw] = []
    end = 0
    for row_count, read in zip(row_counts, reads, strict=True):
        end += row_count
        assert len(read.draws) <= row_count, "a row of logits for each row of draws"
        for row, row_draws in enumerate(read.draws, start=end - len(read.draws)):
            rows += [row] * len(row_draws)
            draws += row_draws
    if rows == list(range(logits.shape[0])):
        return sample(logits, draws)
    return sample(logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)], draws)


def _target_logprobs(logits: Tensor, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    if not token_ids:
        return ()
    targets = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    logprobs = torch.log_softmax(logits[: len(token_ids)].float(), dim=-1)
    return tuple(logprobs.gather(1, targets[:, None])[:, 0].tolist())


def _top(logits: Tensor, count: int) -> tuple[Candidate, ...]:
    if count == 0:
        return ()
    logprobs = torch.log_softmax(logits[-1].float(), dim=-1)
    ordered, token_ids = torch.topk(logprobs, min(count, logprobs.shape[0]))
    pairs = zip(token_ids.tolist(), ordered.tolist(), strict=True)
    return tuple(Candidate(token_id, logprob) for token_id, logprob in pairs)
