"""A worker whose steps of decode are recorded answers as one whose steps are not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixd.v1 import worker_pb2
from prefixd.worker.config import ModelConfig, WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model_setup import load_runner, recording_runner
from tests.support.controller import controller_thread
from tests.support.graphs import CpuRecorder, DenseBackend, Recording
from tests.support.models import write_mixed_model
from tests.support.worker import collect_samples, tokens_request, worker_thread

LIMITS = SchedulerLimits(chunk_token_count_max=16, running_sequence_count_max=6, token_budget=40)
SHARED = tuple(position * 13 % 250 for position in range(24))


def requests() -> list[worker_pb2.GenerateRequest]:
    """Prompts that share beginnings, are equal, or are one token; greedy, drawn, beams, samples."""
    drawn = worker_pb2.SamplingOptions(temperature=1.0, top_k=50, top_p=0.95, seed=7)
    fields = {"token_count_max": 9, "ignore_end_of_sequence": True}
    return [
        tokens_request((*SHARED, 1, 2, 3), **fields),
        tokens_request((*SHARED, 1, 2, 3), sampling=drawn, **fields),
        tokens_request((*SHARED, 9), **fields),
        tokens_request(SHARED, **fields),
        tokens_request(SHARED[:16], sampling=drawn, **fields),
        tokens_request((5,), sampling=drawn, **fields),
        tokens_request((*SHARED, 7), sample_count=3, sampling=drawn, **fields),
        tokens_request((*SHARED, 1, 8), prompt_logprobs=True, **fields),
        tokens_request((3, 1, 4) * 6, draft_token_count_max=3, **fields),
        tokens_request((*SHARED, 4), beam_search=worker_pb2.BeamSearch(beam_count=3), **fields),
    ]


def runner_of(folder: Path) -> ModelRunner:
    """The tiny model on the torch backend."""
    config = ModelConfig(
        model=str(folder), attention_backend="torch", device="cpu", block_size=4, block_count=512
    )
    return load_runner(config, report=print)


def answers(runner: ModelRunner, *, pool_name: str) -> list[list[tuple[int, ...]]]:
    """The tokens of all answers, all requests at once; cold, then from the cache."""
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name=pool_name, limits=LIMITS)
        with worker_thread(config, runner) as (_, client), ThreadPoolExecutor(10) as threads:

            def tokens(request: worker_pb2.GenerateRequest) -> list[tuple[int, ...]]:
                parts = client.worker.Generate(request, timeout=90)
                return [answer.token_ids for answer in collect_samples(parts)]

            return [found for _ in range(2) for found in threads.map(tokens, requests())]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Path:
    """A model of one KV group, or of four."""
    if request.param == "llama":
        return tiny_folder
    return write_mixed_model(tmp_path, vocabulary_size=258)


@pytest.mark.parametrize("folder", ["llama", "mixed"], indirect=True)
def test_recorded_steps_change_no_answer(folder: Path) -> None:
    """Prompts join rows' blocks and rows join prompts'; six rows at most, padded to 1, 2, 4, 6."""
    expected = answers(runner_of(folder), pool_name="plain")
    recorder, lines = CpuRecorder(), []
    recorded = recording_runner(runner_of(folder), DenseBackend(), recorder, LIMITS, lines.append)
    assert recorded.has_graphs
    assert ["recorded as CUDA graphs in" in line for line in lines] == [True]
    assert answers(recorded, pool_name="recorded") == expected
    assert sum(recording.replay_count for recording in recorder.recordings) > 20


def test_a_model_that_cannot_be_recorded_runs_all_the_same(tiny_folder: Path) -> None:
    """The reason is told, and the runner is the one that was there."""

    class Refusing(CpuRecorder):
        def record(self, run: Callable[[], None]) -> Recording:
            raise RuntimeError("operation not permitted when stream is capturing")

    runner, lines = runner_of(tiny_folder), []
    assert recording_runner(runner, DenseBackend(), Refusing(), LIMITS, lines.append) is runner
    assert ["operation not permitted" in line for line in lines] == [True]
