"""Log probabilities of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import controller_thread
from tests.support.models import eager_folder, eager_logits
from tests.support.pass_runners import FaultyRunner, Wrapping
from tests.support.worker import Client, strict_runner, tokens_request, worker_thread

PROMPT = tuple(position * 37 % 250 for position in range(70))
LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)


@pytest.fixture(scope="module")
def calls(tiny_folder: Path) -> Iterator[Client]:
    """A worker with a roomy pool."""
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="tiny", limits=LIMITS)
        with worker_thread(config, strict_runner(tiny_folder, block_count=256)) as (_, client):
            yield client


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[float]:
    """What transformers says."""
    logits = eager_logits(eager_folder(tiny_folder), PROMPT)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(PROMPT[1:])]


def test_s9_prompt_logprobs_equal_those_of_transformers(
    calls: Client, expected: list[float]
) -> None:
    """S9: all of them, although the prompt is cached: nothing is read from the cache."""
    calls.generate(tokens_request(PROMPT, token_count_max=1))

    answer = calls.generate(tokens_request(PROMPT, token_count_max=4, prompt_logprobs=True))

    assert answer.finished.cached_token_count == 0
    assert answer.prompt_logprobs == pytest.approx(expected, abs=1e-4)


def test_s9_what_was_computed_for_logprobs_is_published(calls: Client) -> None:
    """S9: the next request reuses it, and its answer is the same."""
    prompt = (9, *PROMPT)
    fields = {"token_count_max": 8, "ignore_end_of_sequence": True}
    first = calls.generate(tokens_request(prompt, prompt_logprobs=True, **fields))
    second = calls.generate(tokens_request(prompt, **fields))

    assert second.finished.cached_token_count == 68
    assert first.token_ids == second.token_ids
    assert second.prompt_logprobs is None


def test_prompt_of_one_token_has_no_logprob(calls: Client) -> None:
    """The first token stands behind nothing."""
    answer = calls.generate(tokens_request([5], token_count_max=1, prompt_logprobs=True))
    assert answer.prompt_logprobs == ()


def test_failed_passes_leave_the_logprobs_right(tiny_folder: Path, expected: list[float]) -> None:
    """What a failed pass computed is computed again; each token has one log probability."""
    wrapping = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 3 == 0))
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="tiny", limits=LIMITS)
        runner = strict_runner(tiny_folder, block_count=64)
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            answer = client.generate(
                tokens_request(PROMPT, token_count_max=6, prompt_logprobs=True)
            )

    assert wrapping.runner.broken_count > 1
    assert answer.prompt_logprobs == pytest.approx(expected, abs=1e-4)
