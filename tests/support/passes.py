"""Ways to cut prompts into passes, each checked against the model's own eager attention.

All tables are scattered; the second prompt begins with the first two blocks of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prefixd.worker.model.loaded import LoadedModel
from tests.support.models import PagedHarness, eager_logits, random_tokens

DIFFERENCE_MAX = 1e-5
"""Largest difference of logits, relative to the largest logit."""

SHARED_TOKEN_COUNT = 32
FIRST_TABLE = (40, 7, 21, 22, 23, 3, 50, 30, 31)
SECOND_TABLE = (40, 7, 60, 12, 13, 14, 15, 16)


class Subject:
    """A model of one KV group, and two prompts with their logits by the model's eager twin."""

    def __init__(self, model: LoadedModel, twin: Any, token_count: int) -> None:
        self.model = model
        below = model.vocabulary_size
        self.first = random_tokens(token_count, below=below, seed=1)
        rest_count = token_count - SHARED_TOKEN_COUNT - 9
        self.second = self.first[:SHARED_TOKEN_COUNT] + random_tokens(
            rest_count, below=below, seed=2
        )
        self.first_logits = eager_logits(twin, self.first)
        self.second_logits = eager_logits(twin, self.second)

    def harness(self, backend: str) -> PagedHarness:
        """A fresh pool."""
        return PagedHarness(self.model, backend=backend)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares logits, and that there is something to compare."""
    scale = float(expected.abs().max())
    assert scale > 0.5
    assert expected.shape == actual.shape
    torch.testing.assert_close(actual, expected, atol=DIFFERENCE_MAX * scale, rtol=0.0)


def check_cold(subject: Subject, backend: str) -> None:
    """One pass over a whole prompt."""
    assert_close(subject.harness(backend).whole(subject.first, FIRST_TABLE), subject.first_logits)


def check_chunked(subject: Subject, backend: str) -> None:
    """A prompt in chunks of odd sizes, one of them a token; borders in and between blocks."""
    harness = subject.harness(backend)
    borders = [0, 5, 32, 33, len(subject.first) - 5, len(subject.first)]
    parts = [
        harness.run(harness.chunk(subject.first, FIRST_TABLE, start, end))[0]
        for start, end in pairwise(borders)
    ]
    assert_close(torch.cat(parts), subject.first_logits)


def check_prefix_hit(subject: Subject, backend: str) -> None:
    """Another prompt on the two blocks that the first one wrote."""
    harness = subject.harness(backend)
    harness.whole(subject.first, FIRST_TABLE)
    chunk = harness.chunk(subject.second, SECOND_TABLE, SHARED_TOKEN_COUNT, len(subject.second))
    assert_close(harness.run(chunk)[0], subject.second_logits[SHARED_TOKEN_COUNT:])


def check_decode(subject: Subject, backend: str) -> None:
    """Two sequences that share blocks, a token each per pass."""
    harness = subject.harness(backend)
    first, second = subject.first, subject.second
    first_start, second_start = len(first) - 4, len(second) - 4
    harness.run(harness.chunk(first, FIRST_TABLE, 0, first_start))
    harness.run(harness.chunk(second, SECOND_TABLE, SHARED_TOKEN_COUNT, second_start))
    first_parts, second_parts = [], []
    for step in range(4):
        first_row, second_row = harness.run(
            harness.chunk(first, FIRST_TABLE, first_start + step, first_start + step + 1),
            harness.chunk(second, SECOND_TABLE, second_start + step, second_start + step + 1),
        )
        first_parts.append(first_row)
        second_parts.append(second_row)
    assert_close(torch.cat(first_parts), subject.first_logits[first_start:])
    assert_close(torch.cat(second_parts), subject.second_logits[second_start:])


def check_mixed(subject: Subject, backend: str) -> None:
    """A decode row, a reader of what is written in this very pass, and its writer."""
    harness = subject.harness(backend)
    other: Sequence[int] = subject.first[:20]
    other_table = (5, 33)
    harness.run(harness.chunk(other, other_table, 0, 19))
    _, second, first = harness.run(
        harness.chunk(other, other_table, 19, 20),
        harness.chunk(subject.second, SECOND_TABLE, SHARED_TOKEN_COUNT, len(subject.second)),
        harness.chunk(subject.first, FIRST_TABLE, 0, len(subject.first)),
    )
    assert_close(second, subject.second_logits[SHARED_TOKEN_COUNT:])
    assert_close(first, subject.first_logits)


CHECKS: dict[str, Callable[[Subject, str], None]] = {
    "cold": check_cold,
    "chunked": check_chunked,
    "prefix_hit": check_prefix_hit,
    "decode": check_decode,
    "s10_mixed": check_mixed,
}
"""By name. S10: a block may be read in the pass that writes it, whatever the order of the rows."""
