"""Many answers at a time: in too small a pool, with equal prompts, on two workers."""

from __future__ import annotations

import random
from pathlib import Path

from prefixd.v1 import worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, stubs
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    Generated,
    collect,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

ANSWER_TOKEN_COUNT = 40
LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80, running_sequence_count_max=20)


def prompts(count: int) -> list[list[int]]:
    """Prompts of 20 to 40 tokens; some begin alike."""
    chooser = random.Random(5)
    common = [chooser.randrange(256) for _ in range(16)]
    return [
        (common if index % 3 == 0 else [])
        + [chooser.randrange(256) for _ in range(chooser.randrange(20, 25))]
        for index in range(count)
    ]


def request(prompt: list[int], **fields: object) -> worker_pb2.GenerateRequest:
    """Asks for a drawn answer of fixed length, the same each time."""
    sampling = worker_pb2.SamplingOptions(temperature=0.8, seed=sum(prompt))
    return tokens_request(
        prompt,
        token_count_max=ANSWER_TOKEN_COUNT,
        ignore_end_of_sequence=True,
        sampling=sampling,
        **fields,
    )


def together(client: Client, requests: list[worker_pb2.GenerateRequest]) -> list[Generated]:
    """Sends all requests at once and waits for all answers."""
    streams = [client.worker.Generate(one, timeout=120) for one in requests]
    return [collect(stream) for stream in streams]


def unhurried(
    folder: Path, address: str, requests: list[worker_pb2.GenerateRequest]
) -> list[tuple[int, ...]]:
    """The answers one by one in a roomy pool, without the cache."""
    config = WorkerConfig(controller=address, pool_name="roomy", limits=LIMITS)
    with worker_thread(config, strict_runner(folder, block_count=512)) as (_, client):
        answers = []
        for one in requests:
            alone = worker_pb2.GenerateRequest()
            alone.CopyFrom(one)
            alone.skip_cache_read = True
            answers.append(client.generate(alone).token_ids)
        return answers


def test_twenty_answers_in_a_pool_that_holds_three(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """Preemptions happen, everybody's answer comes, and each is what it would be alone."""
    requests = [request(prompt) for prompt in prompts(20)]
    expected = unhurried(tiny_folder, controller.address, requests)
    # Three sequences of at most 79 computed tokens: 20 blocks of 4 each.
    config = WorkerConfig(controller=controller.address, pool_name="tight", limits=LIMITS)
    runner = strict_runner(tiny_folder, block_count=61)
    with worker_thread(config, runner) as (_, client), stubs(controller.address) as control:
        answers = together(client, requests)
        info = client.info()
        pool = wait_idle(control, "tight")

    assert [answer.token_ids for answer in answers] == expected
    assert info.preemption_count > 0
    assert sum(a.finished.preemption_count for a in answers) == info.preemption_count
    assert pool.statistics.preempted_sequence_count > 0
    assert pool.held_block_count == 0
    assert pool.free_block_count + pool.evictable_block_count == 60


def test_equal_cold_prompts_compute_their_prefix_once(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S10: of four equal prompts that arrive together three join the first one's pending blocks."""
    prompt = prompts(1)[0] * 3
    config = WorkerConfig(controller=controller.address, pool_name="joined", limits=LIMITS)
    with worker_thread(config, strict_runner(tiny_folder, block_count=256)) as (_, client):
        answers = together(client, [request(prompt)] * 4)
        info = client.info()

    assert len({answer.token_ids for answer in answers}) == 1
    cached = sorted(answer.finished.cached_token_count for answer in answers)
    most = (len(prompt) - 1) // 4 * 4
    assert cached == [0, most, most, most]
    assert info.prefill_token_count == len(prompt) + 3 * (len(prompt) - most)


def test_two_workers_with_different_models_share_a_controller(
    tiny_folder: Path, controller: ControllerThread, tmp_path: Path
) -> None:
    """Pools keep apart: other weights, other block size, nothing of the other's is matched."""
    other_folder = write_tiny_model(tmp_path, seed=7, layer_count=1)
    prompt = prompts(1)[0]
    first_config = WorkerConfig(controller=controller.address, pool_name="first", limits=LIMITS)
    other_config = WorkerConfig(controller=controller.address, pool_name="other", limits=LIMITS)
    first_runner = strict_runner(tiny_folder, block_count=64, block_size=4)
    other_runner = strict_runner(other_folder, block_count=32, block_size=16)
    with (
        worker_thread(first_config, first_runner) as (_, first),
        worker_thread(other_config, other_runner) as (_, other),
    ):
        one = first.generate(request(prompt))
        two = other.generate(request(prompt))
        again = [first.generate(request(prompt)), other.generate(request(prompt))]

    assert two.finished.cached_token_count == 0
    assert one.token_ids != two.token_ids
    assert [a.token_ids for a in again] == [one.token_ids, two.token_ids]
    last = len(prompt) - 1
    assert [a.finished.cached_token_count for a in again] == [last // 4 * 4, last // 16 * 16]


def test_s10_sixteen_cold_prompts_prefill_little_more_than_one(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S10: sixteen equal prompts of 1,024 tokens at once compute 1,024 tokens and 15 blocks."""
    chooser = random.Random(9)
    prompt = [chooser.randrange(256) for _ in range(1_024)]
    requests = [
        tokens_request(
            prompt,
            token_count_max=8,
            ignore_end_of_sequence=True,
            sampling=worker_pb2.SamplingOptions(temperature=0.8, seed=seed),
        )
        for seed in range(16)
    ]
    config = WorkerConfig(controller=controller.address, pool_name="alone")
    runner = strict_runner(tiny_folder, block_count=128, block_size=16)
    with worker_thread(config, runner) as (_, client):
        alone = [client.generate(one).token_ids for one in requests]
    config = WorkerConfig(controller=controller.address, pool_name="sixteen")
    runner = strict_runner(tiny_folder, block_count=128, block_size=16)
    with worker_thread(config, runner) as (_, client):
        answers = together(client, requests)
        info = client.info()

    assert [answer.token_ids for answer in answers] == alone
    assert len(set(alone)) == 16
    assert info.prefill_token_count <= 1_024 + 15 * 16
