"""What is wanted of a pass's logits, and how it is read from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from prefixd.worker.sampling import Draw, choose


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
    """Reads the logits of several chunks; all that is wanted crosses to the host in one copy.

    Args:
        logits: float32 (rows, vocabulary), the rows of chunk after chunk.
        row_counts: how many rows each chunk has.
        reads: what is wanted of each.
    """
    assert logits.shape[0] == sum(row_counts), (logits.shape, row_counts)
    chunks = torch.split(logits, list(row_counts))
    parts = [_choose_all(logits, row_counts, reads)]
    for chunk, read in zip(chunks, reads, strict=True):
        parts += [_target_logprobs(chunk, read.target_token_ids), *_top(chunk, read.top_count)]
    # Token ids and float32 numbers are both exact in float64.
    numbers = iter(torch.cat([part.double() for part in parts]).tolist())
    token_ids = [
        tuple(tuple(int(next(numbers)) for _ in row) for row in read.draws) for read in reads
    ]
    return [
        LogitReading(
            target_logprobs=tuple(islice(numbers, len(read.target_token_ids))),
            token_ids=chosen,
            top=_candidates(list(islice(numbers, 2 * min(read.top_count, logits.shape[1])))),
        )
        for chosen, read in zip(token_ids, reads, strict=True)
    ]


def single_draws(reads: Sequence[LogitRead]) -> list[Draw] | None:
    """The draws of reads that want one token each and nothing else; None where one wants more."""
    draws: list[Draw] = []
    for read in reads:
        if read.target_token_ids or read.top_count or len(read.draws) != 1:
            return None
        (row_draws,) = read.draws
        if len(row_draws) != 1:
            return None
        draws += row_draws
    return draws


def _choose_all(logits: Tensor, row_counts: Sequence[int], reads: Sequence[LogitRead]) -> Tensor:
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
        return choose(logits, draws)
    return choose(logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)], draws)


def _target_logprobs(logits: Tensor, token_ids: tuple[int, ...]) -> Tensor:
    """(targets,), float32."""
    if not token_ids:
        return logits.new_zeros(0)
    targets = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    logprobs = torch.log_softmax(logits[: len(token_ids)].float(), dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0]


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Token ids of the last row's likeliest tokens and their log probabilities: (tokens,) each."""
    if count == 0:
        return logits.new_zeros(0), logits.new_zeros(0)
    logprobs = torch.log_softmax(logits[-1].float(), dim=-1)
    ordered, token_ids = torch.topk(logprobs, min(count, logprobs.shape[0]))
    return token_ids, ordered


def _candidates(numbers: Sequence[float]) -> tuple[Candidate, ...]:
    """From token ids, followed by as many log probabilities."""
    half = len(numbers) // 2
    pairs = zip(numbers[:half], numbers[half:], strict=True)
    return tuple(Candidate(int(token_id), logprob) for token_id, logprob in pairs)
