"""A model with windows in some layers, end to end: its pool has several KV groups (S23)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixd.v1 import admin_pb2, inspect_pb2, types_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.models import eager_folder, eager_logits, write_mixed_model
from tests.support.pass_runners import ObservingRunner, Wrapping
from tests.support.worker import (
    Client,
    collect,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

BLOCK_SIZE = 4
WINDOW = 20
POOL_NAME = "mixed"
FIELDS: dict[str, Any] = {"ignore_end_of_sequence": True}
LIMITS = SchedulerLimits(chunk_token_count_max=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 style: six layers of a window and two of full attention, random weights."""
    return write_mixed_model(tmp_path_factory.mktemp("mixed"), vocabulary_size=160)


@pytest.fixture(scope="module")
def own_controller() -> Iterator[ControllerThread]:
    """A controller for this module."""
    with controller_thread() as thread:
        yield thread


@pytest.fixture(scope="module")
def calls(folder: Path, own_controller: ControllerThread) -> Iterator[Client]:
    """A worker with a roomy pool."""
    config = WorkerConfig(controller=own_controller.address, pool_name=POOL_NAME, limits=LIMITS)
    with worker_thread(config, strict_runner(folder, block_count=1_000)) as (_, client):
        yield client


@pytest.fixture(scope="module")
def options_calls(folder: Path, own_controller: ControllerThread) -> Iterator[Client]:
    """A worker whose pool has the options of single groups, too."""
    config = WorkerConfig(
        controller=own_controller.address,
        pool_name="options",
        limits=LIMITS,
        sub_block_reuse=True,
        merge_duplicates=True,
    )
    with worker_thread(config, strict_runner(folder, block_count=1_000)) as (_, client):
        yield client


def tokens(count: int, *, seed: int) -> list[int]:
    """A random prompt."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, 160) for _ in range(count)]


def test_s23_pool_is_registered_with_its_groups(
    calls: Client, own_controller: ControllerThread
) -> None:
    """S23: full attention, and three groups of a window, two layers each."""
    assert calls.info().pool_name == POOL_NAME
    with stubs(own_controller.address) as control:
        pool = control.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name=POOL_NAME)).pool
    window = types_pb2.KV_GROUP_KIND_SLIDING_WINDOW
    full = types_pb2.KV_GROUP_KIND_FULL_ATTENTION
    kinds = [(g.kind, g.window_token_count, g.layer_count) for g in pool.groups]
    assert kinds == [(full, 0, 2), *[(window, WINDOW, 2)] * 3]


def test_s23_greedy_answer_equals_transformers(calls: Client, folder: Path) -> None:
    """S23: each token is the most likely one by a plain forward, long behind the first window."""
    prompt = tokens(70, seed=1)
    answer = calls.generate(tokens_request(prompt, token_count_max=60, **FIELDS))
    logits = eager_logits(eager_folder(folder), [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(dim=1), atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("shared_count", [16, 21, 40, 63, 100])
def test_s23_warm_answer_equals_cold_answer(calls: Client, shared_count: int) -> None:
    """S23: the blocks that all groups agree on are reused, and the answer stays the same."""
    salt = f"shared {shared_count}"
    first = tokens(100, seed=2)
    second = [*first[:shared_count], *tokens(30, seed=3)]
    calls.generate(tokens_request(first, cache_salt=salt, token_count_max=40, **FIELDS))

    fields = FIELDS | {"token_count_max": 40, "cache_salt": salt}
    warm = calls.generate(tokens_request(second, **fields))
    cold = calls.generate(tokens_request(second, skip_cache_read=True, **fields))

    assert warm.finished.cached_token_count == shared_count // BLOCK_SIZE * BLOCK_SIZE
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("shared_count", [16, 21, 63])
def test_s23_every_shared_token_is_reused_where_a_match_may_end_inside_a_block(
    options_calls: Client, shared_count: int
) -> None:
    """S23: the part of the next block is copied in every group, and the answer stays the same."""
    salt = f"shared {shared_count}"
    first = tokens(100, seed=2)
    second = [*first[:shared_count], 159, *tokens(30, seed=3)]
    assert first[shared_count] != 159
    calls = options_calls
    calls.generate(tokens_request(first, cache_salt=salt, token_count_max=40, **FIELDS))

    fields = FIELDS | {"token_count_max": 40, "cache_salt": salt}
    warm = calls.generate(tokens_request(second, **fields))
    cold = calls.generate(tokens_request(second, skip_cache_read=True, **fields))

    assert warm.finished.cached_token_count == shared_count
    assert warm.token_ids == cold.token_ids


def test_s15_equal_blocks_of_every_group_become_one(
    folder: Path, own_controller: ControllerThread
) -> None:
    """S15, S23: two answers that read no cache share all their full blocks once these are written,
    in each of four groups, and stay what they are."""
    config = WorkerConfig(
        controller=own_controller.address, pool_name="merging", limits=LIMITS, merge_duplicates=True
    )
    prompt = tokens(17, seed=8)
    request = tokens_request(prompt, skip_cache_read=True, token_count_max=12, **FIELDS)
    with stubs(own_controller.address) as control:

        def held_block_count() -> int:
            wanted = inspect_pb2.GetPoolRequest(pool_name="merging")
            return int(control.inspect.GetPool(wanted).pool.held_block_count)

        wrapping = Wrapping(lambda inner: ObservingRunner(inner, held_block_count))
        runner = strict_runner(folder, block_count=200)
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            alone = client.generate(request).token_ids
            wait_idle(control, "merging")
            wrapping.runner.seen.clear()
            streams = [client.worker.Generate(request, timeout=60) for _ in range(2)]
            answers = [collect(stream).token_ids for stream in streams]
            wait_idle(control, "merging")
            control.admin.VerifyPool(admin_pb2.VerifyPoolRequest(pool_name="merging"))

    assert answers == [alone, alone]
    # Each has four full blocks and a partial one per group when the prompt is computed.
    seen = wrapping.runner.seen
    assert max(seen) == 4 * 2 * 5
    assert seen[seen.index(4 * 2 * 5) + 1] == 4 * (4 + 2)


def test_s23_long_answer_holds_one_window_per_group(calls: Client) -> None:
    """S23: the full group holds all, each of three window groups its window and a block."""
    answer = calls.generate(tokens_request(tokens(40, seed=5), token_count_max=100, **FIELDS))
    full_block_count = -(-139 // BLOCK_SIZE)
    window_block_count = answer.finished.block_count - full_block_count
    assert 0 < window_block_count <= 3 * (WINDOW // BLOCK_SIZE + 1)


def test_s23_crowded_pool_changes_no_answer(folder: Path, own_controller: ControllerThread) -> None:
    """S23, S12: preempted sequences and evicted blocks of all groups; nothing stays held."""
    chooser = random.Random(6)
    stem = tokens(60, seed=7)
    requests = [
        tokens_request(
            stem[: chooser.randrange(1, 60)] + tokens(chooser.randrange(1, 20), seed=seed),
            token_count_max=chooser.randrange(1, 40),
            **FIELDS,
        )
        for seed in range(12)
    ]
    config = WorkerConfig(controller=own_controller.address, pool_name="crowded", limits=LIMITS)
    with (
        worker_thread(config, strict_runner(folder, block_count=90)) as (_, client),
        stubs(own_controller.address) as control,
    ):
        streams = [client.worker.Generate(request, timeout=60) for request in requests]
        answers = [collect(stream).token_ids for stream in streams]
        assert wait_idle(control, "crowded").held_block_count == 0
        control.admin.VerifyPool(admin_pb2.VerifyPoolRequest(pool_name="crowded"))
        alone = []
        for request in requests:
            request.skip_cache_read = True
            alone.append(client.generate(request).token_ids)
    assert answers == alone
