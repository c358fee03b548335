"""Prompt lookup: guesses save steps and never change an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.v1 import worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.pass_runners import FaultyRunner, GatedRunner, Wrapping
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    collect,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
FIELDS: dict[str, Any] = {"token_count_max": 120, "ignore_end_of_sequence": True}
PROMPTS = tuple([seed * 11 % 200 + i % 5 for i in range(24 + seed)] for seed in range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers repeat themselves now and then, so that some guesses are right."""
    return write_tiny_model(tmp_path_factory.mktemp("repeating"), initializer_range=0.1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[int, ...]]:
    """The answers without guesses."""
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="plain", limits=LIMITS)
        with worker_thread(config, strict_runner(folder, block_count=256)) as (_, client):
            return [client.generate(tokens_request(p, **FIELDS)).token_ids for p in PROMPTS]


@pytest.fixture(scope="module")
def gated(folder: Path) -> Iterator[tuple[Client, GatedRunner]]:
    """A worker whose passes can be counted."""
    wrapping = Wrapping(GatedRunner)
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="gated", limits=LIMITS)
        runner = strict_runner(folder, block_count=256)
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            yield client, wrapping.runner


def test_s14_answers_with_guesses_are_the_plain_ones(
    gated: tuple[Client, GatedRunner], plain: list[tuple[int, ...]]
) -> None:
    """S14: token by token, in fewer passes where guesses are right; and they are counted."""
    client, runner = gated
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        pass_count = len(runner.plans)
        answer = client.generate(tokens_request(prompt, draft_token_count_max=5, **FIELDS))
        pass_count = len(runner.plans) - pass_count

        assert answer.token_ids == expected
        finished = answer.finished
        assert 0 < finished.accepted_draft_token_count <= finished.draft_token_count
        # Each pass behind the prompt's gives one token and the accepted guesses before it.
        prompt_pass_count = -(-len(prompt) // LIMITS.chunk_token_count_max)
        assert pass_count >= prompt_pass_count + 119 - finished.accepted_draft_token_count
        assert pass_count < prompt_pass_count + 119


def test_s14_drawn_answers_with_guesses_are_the_plain_ones(
    gated: tuple[Client, GatedRunner],
) -> None:
    """S14: a draw depends on seed and position alone, so guesses are checked against it exactly."""
    client, _ = gated
    sampling = worker_pb2.SamplingOptions(temperature=0.4, seed=3)
    plain = client.generate(tokens_request(PROMPTS[0], sampling=sampling, **FIELDS))
    guessed = client.generate(
        tokens_request(PROMPTS[0], sampling=sampling, draft_token_count_max=4, **FIELDS)
    )

    assert guessed.token_ids == plain.token_ids
    assert guessed.finished.draft_token_count > 0


def test_s14_guessed_and_cached_answers_reuse_each_other(
    gated: tuple[Client, GatedRunner], plain: list[tuple[int, ...]]
) -> None:
    """S14: rejected guesses leave no trace in the blocks that are published."""
    client, _ = gated
    client.generate(tokens_request(PROMPTS[1], draft_token_count_max=7, **FIELDS))
    longer = [*PROMPTS[1], *plain[1][:100]]

    warm = client.generate(tokens_request(longer, token_count_max=20, ignore_end_of_sequence=True))

    assert warm.finished.cached_token_count == (len(longer) - 1) // 4 * 4
    assert warm.token_ids == plain[1][100:]


def test_s14_guesses_stand_preemption_and_failed_passes(
    folder: Path, controller: ControllerThread, plain: list[tuple[int, ...]]
) -> None:
    """S14: in a pool for one answer and a half, with passes that break, answers stay the same."""
    wrapping = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 7 == 0))
    config = WorkerConfig(controller=controller.address, pool_name="tight", limits=LIMITS)
    runner = strict_runner(folder, block_count=60)
    with (
        worker_thread(config, runner, wrap_runner=wrapping) as (_, client),
        stubs(controller.address) as control,
    ):
        streams = [
            client.worker.Generate(
                tokens_request(prompt, draft_token_count_max=6, **FIELDS), timeout=90
            )
            for prompt in PROMPTS
        ]
        answers = [collect(stream) for stream in streams]
        info = client.info()
        pool = wait_idle(control, "tight")

    assert [answer.token_ids for answer in answers] == plain
    assert info.preemption_count > 0
    assert wrapping.runner.broken_count > 0
    assert pool.held_block_count == 0
