"""Answers through LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from prefixd.v1 import inspect_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.lora import LoraIdentity
from tests.support.adapters import merged_model, write_adapter
from tests.support.controller import controller_thread, stubs
from tests.support.models import eager_logits
from tests.support.pass_runners import GatedRunner, Wrapping
from tests.support.worker import (
    Client,
    collect,
    error_reason,
    strict_runner,
    tokens_request,
    wait_until,
    worker_thread,
)

PROMPT = tuple(position * 31 % 250 for position in range(45))
FIELDS: dict[str, Any] = {"token_count_max": 12, "ignore_end_of_sequence": True}
LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
NAMES = ("", "poet", "clerk")


@dataclass(frozen=True)
class Setting:
    """A worker with two adapters."""

    client: Client
    runner: GatedRunner
    controller_address: str
    model_folder: Path
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def setting(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A tiny model with the adapters poet (rank 4) and clerk (rank 2, rank-stabilised)."""
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        "poet": write_adapter(folder / "poet", tiny_folder, seed=1),
        "clerk": write_adapter(folder / "clerk", tiny_folder, seed=2, rank=2, use_rslora=True),
    }
    loras = tuple(LoraIdentity(name, str(path), "1") for name, path in folders.items())
    runner = strict_runner(tiny_folder, block_count=256, loras=loras)
    wrapping = Wrapping(GatedRunner)
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="lora", limits=LIMITS)
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            yield Setting(client, wrapping.runner, controller.address, tiny_folder, folders)


@pytest.mark.parametrize("name", ["poet", "clerk"])
def test_adapter_computes_what_the_merged_model_does(setting: Setting, name: str) -> None:
    """Its log probabilities are those of weights with the adapter's product added."""
    answer = setting.client.generate(
        tokens_request(PROMPT, token_count_max=1, lora_name=name, prompt_logprobs=True)
    )
    network = merged_model(setting.model_folder, setting.folders[name])
    logprobs = torch.log_softmax(eager_logits(network, PROMPT).float(), dim=-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(PROMPT[1:])]

    assert answer.prompt_logprobs == pytest.approx(expected, abs=1e-3)


def test_s2_adapters_never_share_a_block(setting: Setting) -> None:
    """S2: each adapter, and none, finds its own blocks only."""
    prompt = (7, *PROMPT)

    def cached(name: str) -> int:
        request = tokens_request(prompt, token_count_max=1, lora_name=name)
        return setting.client.generate(request).finished.cached_token_count

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert [cached(name) for name in NAMES] == [44, 44, 44]


def test_s2_salt_is_no_adapter_of_the_same_name(setting: Setting) -> None:
    """S2: a salt called like an adapter finds nothing of the adapter's, and the other way round."""
    prompt = (6, *PROMPT)

    def cached(**fields: Any) -> int:
        request = tokens_request(prompt, token_count_max=1, **fields)
        return setting.client.generate(request).finished.cached_token_count

    assert cached(lora_name="poet") == 0
    assert cached(cache_salt="poet") == 0
    assert cached(cache_salt="poet", lora_name="poet") == 0
    assert cached(lora_name="poet") == cached(cache_salt="poet") == 44


def test_adapters_share_a_pass_and_answers_are_those_alone(setting: Setting) -> None:
    """Together, cached and uncached, each answer is bitwise the one computed alone."""
    prompt = (8, *PROMPT)
    requests = [tokens_request(prompt, lora_name=name, **FIELDS) for name in NAMES]
    alone = []
    for request in requests:
        uncached = worker_pb2.GenerateRequest()
        uncached.CopyFrom(request)
        uncached.skip_cache_read = True
        uncached.cache_salt = "alone"
        alone.append(setting.client.generate(uncached).token_ids)
    plan_count = len(setting.runner.plans)
    for _ in range(2):
        streams = [setting.client.worker.Generate(request, timeout=60) for request in requests]
        assert [collect(stream).token_ids for stream in streams] == alone

    assert len(set(alone)) == 3
    passes = setting.runner.plans[plan_count:]
    assert any(len({c.sequence.lora for c in plan.chunks}) == 3 for plan in passes)


def test_s5_inspection_shows_the_adapter(setting: Setting) -> None:
    """S5: name, path and version stand in the identity of the sequence."""
    setting.runner.close()
    stream = setting.client.worker.Generate(
        tokens_request(PROMPT, lora_name="poet", sequence_id="shown", **FIELDS), timeout=60
    )
    setting.runner.wait_held()
    request = inspect_pb2.ListSequencesRequest(pool_name="lora")
    with stubs(setting.controller_address) as control:
        wait_until(lambda: bool(control.inspect.ListSequences(request).sequences))
        (sequence,) = control.inspect.ListSequences(request).sequences
    setting.runner.open()
    collect(stream)

    lora = sequence.identity.lora
    assert (lora.name, lora.path, lora.version) == ("poet", str(setting.folders["poet"]), "1")


def test_worker_tells_its_adapters(setting: Setting) -> None:
    """Names, folders and versions."""
    adapters = setting.client.info().lora_adapters
    assert [(a.name, a.path, a.version) for a in adapters] == [
        (name, str(setting.folders[name]), "1") for name in ("poet", "clerk")
    ]


def test_unknown_adapter_is_refused(setting: Setting) -> None:
    """A name that the worker was not given names the field."""
    with pytest.raises(grpc.RpcError) as caught:
        setting.client.generate(tokens_request(PROMPT, lora_name="painter", **FIELDS))
    assert error_reason(caught.value) == "FIELD_INVALID"
    assert "painter" in caught.value.details()


@pytest.mark.parametrize("name", ["x" * 20_000, "\U0001f600" * 3_000])
def test_unknown_adapter_is_refused_however_long_its_name_is(setting: Setting, name: str) -> None:
    """The error arrives whole: its text is cut in the middle, so that trailers have room for it."""
    with pytest.raises(grpc.RpcError) as refused:
        setting.client.generate(tokens_request(PROMPT, lora_name=name, **FIELDS))
    assert error_reason(refused.value) == "FIELD_INVALID"
    assert "there are: " in str(refused.value.details())
