"""The runner's logits are those of plain transformers, however the tokens are cut into passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixd.worker.model.loaded import LoadedModel
from tests.support.models import (
    CONFIGS,
    PagedHarness,
    eager_logits,
    eager_twin,
    in_one_group,
    random_model,
    random_tokens,
)

DIFFERENCE_MAX = 2e-4
BACKENDS = ("reference", "strict", "torch")
TOKEN_COUNT = 75


class Subject:
    """A model, its eager twin, two prompts with a common prefix of two blocks, their logits."""

    def __init__(self, model: LoadedModel, twin: Any, token_count: int) -> None:
        self.model = model
        below = model.vocabulary_size
        self.first = random_tokens(token_count, below=below, seed=1)
        self.second = self.first[:32] + random_tokens(token_count - 41, below=below, seed=2)
        self.first_logits = eager_logits(twin, self.first)
        self.second_logits = eager_logits(twin, self.second)

    def harness(self, backend: str) -> PagedHarness:
        """A fresh pool."""
        return PagedHarness(self.model, backend=backend)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest) -> Subject:
    """One tiny model of each family."""
    model = in_one_group(random_model(CONFIGS[request.param]()))
    return Subject(model, eager_twin(model), TOKEN_COUNT)


@pytest.fixture(scope="module")
def smol(smollm2: LoadedModel, smollm2_eager: Any) -> Subject:
    """The real model."""
    return Subject(smollm2, smollm2_eager, 130)


# Out of order, with a gap; the second sequence shares the first two blocks.
FIRST_TABLE = (40, 7, 21, 22, 23, 3, 50, 30, 31)
SECOND_TABLE = (40, 7, 60, 12, 13, 14, 15, 16)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares logits, and that there is something to compare."""
    assert expected.abs().max() > 0.5
    assert expected.shape == actual.shape
    torch.testing.assert_close(actual, expected, atol=DIFFERENCE_MAX, rtol=0.0)


def check_cold(subject: Subject, backend: str) -> None:
    """One pass over a whole prompt."""
    assert_close(subject.harness(backend).whole(subject.first, FIRST_TABLE), subject.first_logits)


def check_chunked(subject: Subject, backend: str, cuts: Sequence[int]) -> None:
    """The prompt in chunks whose borders fall inside and between blocks."""
    harness = subject.harness(backend)
    ends = [*cuts, len(subject.first)]
    parts = [
        harness.run(harness.chunk(subject.first, FIRST_TABLE, start, end))[0]
        for start, end in zip([0, *cuts], ends, strict=True)
    ]
    assert_close(torch.cat(parts), subject.first_logits)


def check_prefix_hit(subject: Subject, backend: str) -> None:
    """Another prompt on the two blocks that the first one wrote."""
    harness = subject.harness(backend)
    harness.whole(subject.first, FIRST_TABLE)
    chunk = harness.chunk(subject.second, SECOND_TABLE, 32, len(subject.second))
    assert_close(harness.run(chunk)[0], subject.second_logits[32:])


def check_decode(subject: Subject, backend: str) -> None:
    """Two sequences that share blocks, a token each per pass."""
    harness = subject.harness(backend)
    first, second = subject.first, subject.second
    first_start, second_start = len(first) - 4, len(second) - 4
    harness.run(harness.chunk(first, FIRST_TABLE, 0, first_start))
    harness.run(harness.chunk(second, SECOND_TABLE, 32, second_start))
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
    """A writer, a reader of what it writes in this very pass, and a decode row together."""
    harness = subject.harness(backend)
    other = subject.first[:20]
    other_table = (5, 33)
    harness.run(harness.chunk(other, other_table, 0, 19))
    _, second, first = harness.run(
        harness.chunk(other, other_table, 19, 20),
        harness.chunk(subject.second, SECOND_TABLE, 32, len(subject.second)),
        harness.chunk(subject.first, FIRST_TABLE, 0, len(subject.first)),
    )
    assert_close(second, subject.second_logits[32:])
    assert_close(first, subject.first_logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cold_prefill_equals_transformers(tiny: Subject, backend: str) -> None:
    """A whole prompt in one pass."""
    check_cold(tiny, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_prefill_equals_transformers(tiny: Subject, backend: str) -> None:
    """A prompt in chunks of odd sizes, one of them a single token."""
    check_chunked(tiny, backend, [5, 32, 33, 70])


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_on_cached_prefix_equals_transformers(tiny: Subject, backend: str) -> None:
    """The KV that another sequence wrote serves as prefix."""
    check_prefix_hit(tiny, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_decode_on_shared_blocks_equals_transformers(tiny: Subject, backend: str) -> None:
    """Two sequences with two common blocks decode side by side."""
    check_decode(tiny, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_s10_reader_and_writer_in_one_pass_equal_transformers(tiny: Subject, backend: str) -> None:
    """S10: a block may be read in the pass that writes it, whatever the order of the rows."""
    check_mixed(tiny, backend)


@pytest.mark.model
@pytest.mark.parametrize("backend", ["strict", "torch"])
@pytest.mark.parametrize(
    "check",
    [
        check_cold,
        lambda subject, backend: check_chunked(subject, backend, [50, 51, 96]),
        check_prefix_hit,
        check_decode,
        check_mixed,
    ],
    ids=["cold", "chunked", "prefix_hit", "decode", "mixed"],
)
def test_real_model_equals_transformers(smol: Subject, backend: str, check: Any) -> None:
    """The same on SmolLM2-135M-Instruct."""
    check(smol, backend)
