"""A worker whose model is split over two processes, beside one whose model is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from prefixd.v1 import inspect_pb2, worker_pb2
from prefixd.worker.config import ModelConfig, WorkerConfig
from prefixd.worker.model_setup import load_runner
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.models import random_tokens
from tests.support.worker import (
    Client,
    client,
    collect,
    collect_samples,
    error_reason,
    tokens_request,
    worker_process,
    worker_thread,
)
from tests.worker.parallel.conftest import options

VOCABULARY = 258


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerThread]:
    """One controller of both workers."""
    with controller_thread() as running:
        yield running


@pytest.fixture(scope="module")
def workers(four_heads: Path, controller: ControllerThread) -> Iterator[tuple[Client, Client]]:
    """The whole model, and the split one."""
    model = ModelConfig(model=str(four_heads), device="cpu", block_size=4, block_count=600)
    config = WorkerConfig(controller=controller.address, pool_name="whole")
    with (
        worker_process(*options(four_heads, controller.address)) as process,
        client(process.address) as split_client,
        worker_thread(config, load_runner(model, report=print)) as (_, whole_client),
    ):
        split_client.wait_serving()
        yield whole_client, split_client


def test_answers_equal_those_of_the_whole_model(workers: tuple[Client, Client]) -> None:
    """Greedy and token by token: cold, several at once, chunked, then from the cache."""
    prefix = random_tokens(40, below=VOCABULARY, seed=1)
    prompts = [prefix + random_tokens(4 * i, below=VOCABULARY, seed=i) for i in range(1, 6)]
    requests = [
        tokens_request(prompt, token_count_max=24, ignore_end_of_sequence=True)
        for prompt in (*prompts, random_tokens(700, below=VOCABULARY, seed=9))
    ]
    answers = []
    for calls in workers:
        streams = [calls.worker.Generate(request, timeout=60) for request in requests]
        cold = [collect(stream) for stream in streams]
        warm = [calls.generate(request) for request in requests]
        assert [a.token_ids for a in cold] == [a.token_ids for a in warm]
        assert all(a.started.cached_token_count >= 40 for a in warm)
        answers.append([a.token_ids for a in cold])

    whole, split = answers
    assert whole == split


def test_samples_of_one_prompt_equal_those_of_the_whole_model(
    workers: tuple[Client, Client],
) -> None:
    """Samples share the prompt's blocks, and copy the last one before they write to it."""
    sampling = worker_pb2.SamplingOptions(temperature=1.0, seed=5)
    request = tokens_request(
        random_tokens(30, below=VOCABULARY, seed=3),
        token_count_max=12,
        ignore_end_of_sequence=True,
        sample_count=4,
        sampling=sampling,
    )
    whole, split = (
        [a.token_ids for a in collect_samples(calls.worker.Generate(request, timeout=60))]
        for calls in workers
    )

    assert whole == split
    assert len(set(split)) > 1


def test_a_split_worker_says_so(
    workers: tuple[Client, Client], controller: ControllerThread
) -> None:
    """In its description, and in the format of its KV, so that pools are not mixed up."""
    whole, split = (calls.info() for calls in workers)
    with stubs(controller.address) as control:
        formats = {
            pool.pool_name: pool.kv_format
            for pool in control.inspect.ListPools(inspect_pb2.ListPoolsRequest()).pools
        }

    assert (whole.rank_count, split.rank_count) == (1, 2)
    assert formats == {
        "whole": "float32 slot-major",
        "split": "float32 slot-major, heads over 2 ranks",
    }


def test_each_rank_holds_half_of_the_pool(workers: tuple[Client, Client]) -> None:
    """Both together take what the whole model takes."""
    whole, split = (calls.info() for calls in workers)

    assert split.token_byte_count == whole.token_byte_count


def test_a_split_worker_keeps_its_weights(workers: tuple[Client, Client]) -> None:
    """Other ones are refused, and it goes on as before."""
    _, split = workers
    request = worker_pb2.ReloadWeightsRequest(model_version="v2")
    with pytest.raises(grpc.RpcError) as caught:
        split.worker.ReloadWeights(request, timeout=60)

    assert error_reason(caught.value) == "WEIGHTS_UNUSABLE"
    assert "split over 2 ranks" in caught.value.details()
    assert split.info().model_version == ""
