"""Several answers to one prompt, which is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.v1 import inspect_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.pass_runners import FaultyRunner, GatedRunner, ObservingRunner, Wrapping
from tests.support.worker import (
    Client,
    collect_samples,
    error_reason,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

PROMPT = tuple(position * 29 % 250 for position in range(46))
SAMPLING = worker_pb2.SamplingOptions(temperature=1.2, seed=100)
FIELDS: dict[str, Any] = {"token_count_max": 20, "ignore_end_of_sequence": True}
LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
SAMPLE_COUNT = 5


@pytest.fixture(scope="module")
def calls(tiny_folder: Path) -> Iterator[Client]:
    """A worker with a roomy pool."""
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="roomy", limits=LIMITS)
        with worker_thread(config, strict_runner(tiny_folder, block_count=512)) as (_, client):
            yield client


@pytest.fixture(scope="module")
def singles(calls: Client) -> list[tuple[int, ...]]:
    """What requests for one answer each get, under the seeds of the samples."""
    answers = []
    for index in range(SAMPLE_COUNT):
        sampling = worker_pb2.SamplingOptions(temperature=1.2, seed=100 + index)
        request = tokens_request(PROMPT, sampling=sampling, cache_salt="single", **FIELDS)
        answers.append(calls.generate(request).token_ids)
    return answers


def samples_request(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> worker_pb2.GenerateRequest:
    """Asks for several drawn answers."""
    merged = {"sample_count": SAMPLE_COUNT, "sampling": SAMPLING, **FIELDS, **fields}
    return tokens_request(prompt, **merged)


def samples(client: Client, request: worker_pb2.GenerateRequest) -> list[tuple[int, ...]]:
    """The tokens of all answers."""
    answers = collect_samples(client.worker.Generate(request, timeout=90))
    return [answer.token_ids for answer in answers]


def test_s16_samples_are_the_answers_to_single_requests(
    calls: Client, singles: list[tuple[int, ...]]
) -> None:
    """S16: sample i is drawn with the seed plus i; sharing blocks changes no token."""
    assert len(set(singles)) == SAMPLE_COUNT
    assert samples(calls, samples_request()) == singles


def test_s16_prompt_is_computed_once(calls: Client) -> None:
    """S16: its tokens are prefilled once, and no sample computes one again."""
    prompt = (3, *PROMPT)
    before = calls.info()
    answers = collect_samples(calls.worker.Generate(samples_request(prompt), timeout=90))
    after = calls.info()

    assert after.prefill_token_count - before.prefill_token_count == len(prompt)
    # The last token of an answer is never computed.
    assert after.decode_token_count - before.decode_token_count == SAMPLE_COUNT * 19
    assert [a.finished.sample_index for a in answers] == list(range(SAMPLE_COUNT))


def test_s16_held_blocks_are_those_of_the_prompt_and_private_tails(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S16: eight samples of 1,030 tokens hold 64 blocks together and one or two each."""
    config = WorkerConfig(controller=controller.address, pool_name="eight")
    runner = strict_runner(tiny_folder, block_count=128, block_size=16)
    prompt = tuple(position * 7 % 250 for position in range(1_030))
    with stubs(controller.address) as control:

        def held_block_count() -> int:
            request = inspect_pb2.GetPoolRequest(pool_name="eight")
            return int(control.inspect.GetPool(request).pool.held_block_count)

        wrapping = Wrapping(lambda inner: ObservingRunner(inner, held_block_count))
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            samples(client, samples_request(prompt, sample_count=8, token_count_max=16))

    # Chunks of 512; then 64 whole blocks and six tokens of one more, of which each sample has a
    # copy, and ten tokens later a second block.
    assert wrapping.runner.seen == [32, 64, 65, *[64 + 8] * 10, *[64 + 8 * 2] * 5]


def test_s16_samples_stand_preemption_and_failed_passes(
    tiny_folder: Path, controller: ControllerThread, singles: list[tuple[int, ...]]
) -> None:
    """S16: in a pool for two sequences, with passes that break, answers stay the same."""
    wrapping = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 6 == 0))
    config = WorkerConfig(controller=controller.address, pool_name="tight", limits=LIMITS)
    runner = strict_runner(tiny_folder, block_count=26)
    with (
        worker_thread(config, runner, wrap_runner=wrapping) as (_, client),
        stubs(controller.address) as control,
    ):
        answers = samples(client, samples_request())
        info = client.info()
        pool = wait_idle(control, "tight")

    assert answers == singles
    assert info.preemption_count > 0
    assert pool.held_block_count == 0


def test_samples_with_other_options(calls: Client, singles: list[tuple[int, ...]]) -> None:
    """Log probabilities come once for all; guesses change no sample."""
    request = samples_request(prompt_logprobs=True, draft_token_count_max=4)
    answers = collect_samples(calls.worker.Generate(request, timeout=90))

    assert [answer.token_ids for answer in answers] == singles
    assert answers[0].prompt_logprobs is not None
    assert len(answers[0].prompt_logprobs) == len(PROMPT) - 1


def test_samples_of_one_token_need_no_fork(calls: Client, singles: list[tuple[int, ...]]) -> None:
    """All first tokens are drawn from the prompt's last logits."""
    answers = samples(calls, samples_request(token_count_max=1))
    assert answers == [single[:1] for single in singles]


def test_cancelled_samples_leave_nothing_held(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A client that goes away closes every sample."""
    config = WorkerConfig(controller=controller.address, pool_name="gone", limits=LIMITS)
    with (
        worker_thread(config, strict_runner(tiny_folder, block_count=512)) as (_, client),
        stubs(controller.address) as control,
    ):
        stream = client.worker.Generate(samples_request(token_count_max=200), timeout=90)
        for response in stream:
            if response.chunk.sample_index == SAMPLE_COUNT - 1:
                break
        stream.cancel()
        pool = wait_idle(control, "gone")

    assert pool.held_block_count == 0


@pytest.mark.parametrize("sample_count", [-1, 33])
def test_sample_count_has_bounds(calls: Client, sample_count: int) -> None:
    """The field is named."""
    with pytest.raises(grpc.RpcError) as caught:
        samples(calls, samples_request(sample_count=sample_count))
    assert error_reason(caught.value) == "FIELD_INVALID"


def test_names_below_a_running_name_are_taken(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """Samples are called after their request, so nobody else may be."""
    wrapping = Wrapping(GatedRunner)
    config = WorkerConfig(controller=controller.address, pool_name="names", limits=LIMITS)
    runner = strict_runner(tiny_folder, block_count=512)
    with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
        wrapping.runner.close()
        stream = client.worker.Generate(samples_request(sequence_id="mine"), timeout=90)
        wrapping.runner.wait_held()
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(tokens_request(PROMPT, sequence_id="mine/1"))
        wrapping.runner.open()
        collect_samples(stream)
    assert error_reason(caught.value) == "SEQUENCE_EXISTS"
