"""Matches that end inside a block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.v1 import worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread
from tests.support.worker import Client, collect, strict_runner, tokens_request, worker_thread

FIELDS: dict[str, Any] = {"token_count_max": 12, "ignore_end_of_sequence": True}


@pytest.fixture(scope="module")
def calls(tiny_folder: Path) -> Iterator[Client]:
    """A worker whose pool lets matches end inside a block of 16."""
    with controller_thread() as controller:
        config = WorkerConfig(
            controller=controller.address,
            pool_name="partial",
            sub_block_reuse=True,
            limits=SchedulerLimits(chunk_token_count_max=32),
        )
        runner = strict_runner(tiny_folder, block_count=128, block_size=16)
        with worker_thread(config, runner) as (_, client):
            yield client


@pytest.mark.parametrize("shared_count", [1, 15, 16, 20, 31, 40, 60])
def test_every_shared_token_is_reused_and_answers_stay_the_same(
    calls: Client, shared_count: int
) -> None:
    """Twenty shared tokens with blocks of 16 save twenty, and the answer is the uncached one."""
    salt = f"shared {shared_count}"
    first = [position * 7 % 250 for position in range(64)]
    second = [*first[:shared_count], *(position * 3 % 240 + 3 for position in range(30))]
    assert first[shared_count] != second[shared_count]
    calls.generate(tokens_request(first, cache_salt=salt, **FIELDS))

    warm = calls.generate(tokens_request(second, cache_salt=salt, **FIELDS))
    cold = calls.generate(tokens_request(second, skip_cache_read=True, **FIELDS))

    assert warm.finished.cached_token_count == shared_count
    assert warm.token_ids == cold.token_ids


def test_equal_prompt_computes_its_last_token_only(calls: Client) -> None:
    """S7: the last token is computed for its logits."""
    prompt = [position * 5 % 250 for position in range(61)]
    # A block is matched once it is full: the answer fills the prompt's last one.
    first = calls.generate(tokens_request(prompt, **FIELDS))
    again = calls.generate(tokens_request(prompt, **FIELDS))

    assert again.finished.cached_token_count == 60
    assert again.token_ids == first.token_ids


def test_s10_sixteen_cold_prompts_prefill_two_tokens_more_each(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S10: with sub-block reuse sixteen equal prompts of 1,024 tokens compute 1,024 and 15 * 2."""
    chooser = random.Random(9)
    prompt = [chooser.randrange(256) for _ in range(1_024)]
    config = WorkerConfig(controller=controller.address, pool_name="sixteen", sub_block_reuse=True)
    runner = strict_runner(tiny_folder, block_count=128, block_size=16)
    requests = [
        tokens_request(
            prompt, sampling=worker_pb2.SamplingOptions(temperature=0.8, seed=seed), **FIELDS
        )
        for seed in range(16)
    ]
    with worker_thread(config, runner) as (_, client):
        streams = [client.worker.Generate(request, timeout=90) for request in requests]
        answers = [collect(stream).token_ids for stream in streams]
        info = client.info()
        alone = [client.generate(request).token_ids for request in requests]

    assert answers == alone
    assert info.prefill_token_count <= 1_024 + 15 * 2
