"""Many random requests with all options at once, in a pool that is much too small for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefixd.v1 import admin_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.lora import LoraIdentity
from tests.support.adapters import write_adapter
from tests.support.controller import ControllerThread, stubs
from tests.support.models import write_mixed_model
from tests.support.pass_runners import FaultyRunner, Wrapping
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    Generated,
    collect_samples,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80, running_sequence_count_max=20)
CLIENT_COUNT = 10
TIGHT_BLOCK_COUNT = 60
LORA_NAMES = ("poet", "clerk")


@dataclass(frozen=True)
class Ask:
    """A request; ``cancel_after`` parts its client goes away."""

    request: worker_pb2.GenerateRequest
    cancel_after: int | None


@dataclass(frozen=True)
class Told:
    """What an answer tells that may not depend on anything beside its request."""

    token_ids: tuple[int, ...]
    text: str
    score: float | None
    prompt_logprobs: tuple[float, ...] | None


def random_asks(count: int, *, seed: int) -> list[Ask]:
    """Requests whose prompts often begin alike, with all kinds of options."""
    chooser = random.Random(seed)
    stems = [[chooser.randrange(250) for _ in range(40)] for _ in range(4)]
    return [_random_ask(chooser, stems) for _ in range(count)]


def _random_ask(chooser: random.Random, stems: Sequence[list[int]]) -> Ask:
    stem = chooser.choice(stems)[: chooser.randrange(1, 41)]
    prompt = stem + [chooser.randrange(250) for _ in range(chooser.randrange(0, 12))]
    fields: dict[str, Any] = {
        "token_count_max": chooser.randrange(1, 20),
        "ignore_end_of_sequence": chooser.random() < 0.8,
        "cache_salt": chooser.choice(["", "", "", "tenant"]),
        "lora_name": chooser.choice(["", "", *LORA_NAMES]),
        "skip_cache_read": chooser.random() < 0.1,
        "prompt_logprobs": chooser.random() < 0.1,
    }
    kind = chooser.random()
    if kind < 0.15:
        beam_count = chooser.randrange(2, 4)
        fields["beam_search"] = worker_pb2.BeamSearch(beam_count=beam_count)
        fields["sample_count"] = chooser.randrange(1, beam_count + 1)
    else:
        fields["draft_token_count_max"] = chooser.choice([0, 0, 3, 7])
        fields["sample_count"] = chooser.choice([1, 1, 1, 2, 3])
        temperature = chooser.choice([0.0, 0.0, 0.6])
        fields["sampling"] = worker_pb2.SamplingOptions(
            temperature=temperature, seed=chooser.randrange(1_000)
        )
    cancel_after = chooser.randrange(1, 8) if chooser.random() < 0.1 else None
    return Ask(tokens_request(prompt, **fields), cancel_after)


def told(answers: Sequence[Generated]) -> tuple[Told, ...]:
    """What the answers to one request tell."""
    return tuple(
        Told(
            answer.token_ids,
            answer.text,
            answer.finished.score if answer.finished.HasField("score") else None,
            answer.prompt_logprobs,
        )
        for answer in answers
    )


def uncached(client: Client, ask: Ask) -> tuple[Told, ...]:
    """The answers without anything from the cache."""
    request = worker_pb2.GenerateRequest()
    request.CopyFrom(ask.request)
    request.skip_cache_read = True
    request.draft_token_count_max = 0
    return told(collect_samples(client.worker.Generate(request, timeout=120)))


def answered(client: Client, ask: Ask) -> tuple[Told, ...] | None:
    """The answers; None where the client went away before their end."""
    stream = client.worker.Generate(ask.request, timeout=240)
    if ask.cancel_after is None:
        return told(collect_samples(stream))
    for _, _part in zip(range(ask.cancel_after), stream, strict=False):
        pass
    stream.cancel()
    return None


def reload_now_and_then(client: Client, ask_number: int) -> None:
    """The same weights under another version: answers stay, blocks go."""
    if ask_number % 60 == 30:
        version = f"version {ask_number}"
        client.worker.ReloadWeights(
            worker_pb2.ReloadWeightsRequest(model_version=version), timeout=120
        )


ALL_OPTIONS = {"sub_block_reuse": True, "merge_duplicates": True}


def soak(
    folder: Path,
    adapters: Path,
    controller: ControllerThread,
    asks: list[Ask],
    pool_options: dict[str, bool] = ALL_OPTIONS,
) -> None:
    """Asks everything twice, alone and all together, and compares."""
    loras = tuple(
        LoraIdentity(name, str(write_adapter(adapters / name, folder, seed=seed)))
        for seed, name in enumerate(LORA_NAMES)
    )
    config = WorkerConfig(controller=controller.address, pool_name="roomy", limits=LIMITS)
    runner = strict_runner(folder, block_count=1_024, loras=loras)
    with (
        worker_thread(config, runner) as (_, client),
        ThreadPoolExecutor(CLIENT_COUNT) as clients,
    ):
        expected = list(clients.map(lambda ask: uncached(client, ask), asks))

    wrapping = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 50 == 0))
    config = WorkerConfig(
        controller=controller.address,
        pool_name="tight",
        limits=LIMITS,
        **pool_options,
    )
    runner = strict_runner(folder, block_count=TIGHT_BLOCK_COUNT, loras=loras)
    with (
        worker_thread(config, runner, wrap_runner=wrapping) as (worker, client),
        stubs(controller.address) as control,
    ):

        def one(numbered: tuple[int, Ask]) -> tuple[Told, ...] | None:
            number, ask = numbered
            reload_now_and_then(client, number)
            return answered(client, ask)

        with ThreadPoolExecutor(CLIENT_COUNT) as clients:
            answers = list(clients.map(one, enumerate(asks)))
        info = client.info()
        pool = wait_idle(control, "tight")
        control.admin.VerifyPool(admin_pb2.VerifyPoolRequest(pool_name="tight"))

    for number, (ask, wanted, given) in enumerate(zip(asks, expected, answers, strict=True)):
        assert given in {None, wanted}, f"request {number}: {ask.request}"
    assert info.preemption_count > 0
    assert wrapping.runner.broken_count > 0
    assert pool.statistics.hit_token_count > 0
    assert pool.held_block_count == 0
    disagreements = [
        e for e in worker.log_events if e["event"] in {"step_disagreed", "step_broken"}
    ]
    assert disagreements == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that now and then repeats itself."""
    return write_tiny_model(tmp_path_factory.mktemp("soaked"), seed=2, initializer_range=0.12)


def test_a_hundred_and_fifty_requests_get_their_uncached_answers(
    folder: Path, controller: ControllerThread, tmp_path: Path
) -> None:
    """Every answer is bitwise the uncached one; in the end nothing is held, all invariants hold."""
    soak(folder, tmp_path, controller, random_asks(150, seed=1))


def test_s23_forty_requests_to_a_model_of_several_groups_get_their_uncached_answers(
    controller: ControllerThread, tmp_path: Path
) -> None:
    """S23: the same with windows in most layers, and all that goes with them."""
    folder = write_mixed_model(tmp_path / "mixed", vocabulary_size=258)
    soak(folder, tmp_path, controller, random_asks(40, seed=3), pool_options={})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_requests_get_their_uncached_answers(
    folder: Path, controller: ControllerThread, tmp_path: Path
) -> None:
    """The same for longer."""
    soak(folder, tmp_path, controller, random_asks(2_000, seed=2))
