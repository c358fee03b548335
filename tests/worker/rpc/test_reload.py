"""Other weights under a running worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixd.v1 import inspect_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, stubs
from tests.support.pass_runners import GatedRunner, Wrapping
from tests.support.proxy import proxy
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    WorkerThread,
    collect,
    error_reason,
    strict_runner,
    tokens_request,
    wait_idle,
    wait_until,
    worker_thread,
)

PROMPT = tuple(position * 13 % 250 for position in range(45))
FIELDS: dict[str, Any] = {"token_count_max": 12, "ignore_end_of_sequence": True}
LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=5)


@dataclass(frozen=True)
class Setting:
    """A worker whose passes can be held, and its controller."""

    client: Client
    worker: WorkerThread
    runner: GatedRunner
    controller: ControllerThread

    def reload(self, version: str, folder: Path | str = "") -> worker_pb2.ReloadWeightsResponse:
        """Calls ReloadWeights."""
        request = worker_pb2.ReloadWeightsRequest(model_version=version, folder=str(folder))
        response: worker_pb2.ReloadWeightsResponse = self.client.worker.ReloadWeights(
            request, timeout=60
        )
        return response

    def pool(self) -> inspect_pb2.Pool:
        """The pool as the controller shows it."""
        with stubs(self.controller.address) as control:
            shown: inspect_pb2.Pool = control.inspect.GetPool(
                inspect_pb2.GetPoolRequest(pool_name="tiny")
            ).pool
            return shown


@pytest.fixture
def setting(tiny_folder: Path, controller: ControllerThread) -> Iterator[Setting]:
    """A tiny model's worker; its weights are called v1."""
    wrapping = Wrapping(GatedRunner)
    config = WorkerConfig(
        controller=controller.address, pool_name="tiny", model_version="v1", limits=LIMITS
    )
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(config, runner, wrap_runner=wrapping) as (worker, client):
        yield Setting(client, worker, wrapping.runner, controller)


def refusal(setting: Setting, version: str, folder: Path | str = "") -> str:
    """Why a reload is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        setting.reload(version, folder)
    return error_reason(caught.value)


def answer_of(folder: Path, controller: ControllerThread) -> tuple[int, ...]:
    """The answer of a worker that began with the weights of a folder."""
    config = WorkerConfig(controller=controller.address, pool_name="fresh", limits=LIMITS)
    with worker_thread(config, strict_runner(folder, block_count=64)) as (_, client):
        return client.generate(tokens_request(PROMPT, **FIELDS)).token_ids


def test_s4_other_weights_find_nothing_of_the_earlier_ones(
    setting: Setting, other_folder: Path
) -> None:
    """S4: the answer is that of a worker which began with them, and nothing was cached."""
    before = setting.client.generate(tokens_request(PROMPT, **FIELDS))
    with stubs(setting.controller.address) as control:
        wait_idle(control, "tiny")

    response = setting.reload("v2", other_folder)
    after = setting.client.generate(tokens_request(PROMPT, **FIELDS))

    assert response.previous_model_version == "v1"
    # 45 prompt tokens and 11 computed ones are 14 full blocks.
    assert response.dropped_block_count == 14
    assert after.finished.cached_token_count == 0
    assert before.token_ids != after.token_ids == answer_of(other_folder, setting.controller)
    assert setting.client.info().model_version == setting.pool().model_version == "v2"


def test_s4_running_answers_go_on_and_publish_nothing(setting: Setting, other_folder: Path) -> None:
    """S4: an answer that runs across the reload comes to its end; nobody reuses its blocks."""
    setting.runner.close()
    stream = setting.client.worker.Generate(tokens_request(PROMPT, **FIELDS), timeout=60)
    setting.runner.wait_held()
    reload = setting.client.worker.ReloadWeights.future(
        worker_pb2.ReloadWeightsRequest(model_version="v2", folder=str(other_folder)), timeout=60
    )
    # The change waits for the pass under way; the gate lets that one through alone.
    wait_until(lambda: any(e["event"] == "weights_read" for e in setting.worker.log_events))
    setting.runner.open()
    reload.result()
    running = collect(stream)
    with stubs(setting.controller.address) as control:
        pool = wait_idle(control, "tiny")
    fresh = setting.client.generate(tokens_request(PROMPT, **FIELDS))

    assert running.finished.generated_token_count == 12
    assert pool.published_block_count == pool.evictable_block_count == pool.held_block_count == 0
    assert fresh.finished.cached_token_count == 0
    assert fresh.token_ids == answer_of(other_folder, setting.controller)


def test_s4_weights_may_change_while_the_controller_is_away(
    tiny_folder: Path, other_folder: Path, controller: ControllerThread
) -> None:
    """S4: the epoch ends meanwhile; no step runs before the new one knows the version."""
    wrapping = Wrapping(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    get_pool = inspect_pb2.GetPoolRequest(pool_name="tiny")
    with proxy(controller.address) as between, stubs(controller.address) as control:
        config = WorkerConfig(
            controller=between.address, pool_name="tiny", model_version="v1", limits=LIMITS
        )
        with worker_thread(config, runner, wrap_runner=wrapping) as (worker, client):
            wrapping.runner.close()
            stream = client.worker.Generate(tokens_request(PROMPT, **FIELDS), timeout=60)
            wrapping.runner.wait_held()
            reload = client.worker.ReloadWeights.future(
                worker_pb2.ReloadWeightsRequest(model_version="v2", folder=str(other_folder)),
                timeout=60,
            )
            wait_until(lambda: any(e["event"] == "weights_read" for e in worker.log_events))
            between.pause()
            wait_until(lambda: not control.inspect.GetPool(get_pool).pool.session_active)
            controller.expire_leases(advance_ms=600_001)
            between.resume()
            wrapping.runner.open()
            answer = collect(stream)
            assert reload.result().dropped_block_count == 0
            version = control.inspect.GetPool(get_pool).pool.model_version

    # All of it was computed again, with the new weights, in the new epoch.
    assert answer.token_ids == answer_of(other_folder, controller)
    assert version == "v2"


def test_weights_are_read_again_from_their_own_folder(setting: Setting) -> None:
    """Without a folder it is the one of last time."""
    before = setting.client.generate(tokens_request(PROMPT, **FIELDS))
    setting.reload("v2")
    after = setting.client.generate(tokens_request(PROMPT, **FIELDS))

    assert before.token_ids == after.token_ids
    assert after.finished.cached_token_count == 0


def test_bad_reloads_change_nothing(setting: Setting, tmp_path: Path) -> None:
    """No version, the same version, no weights, another model's, NaN: the old ones stay."""
    other_shape = write_tiny_model(tmp_path / "shape", layer_count=1)
    damaged = write_tiny_model(tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    before = setting.client.generate(tokens_request(PROMPT, **FIELDS))

    assert refusal(setting, "") == "FIELD_INVALID"
    assert refusal(setting, "v" * 257) == "FIELD_INVALID"
    assert refusal(setting, "v1") == "FIELD_INVALID"
    assert refusal(setting, "v2", tmp_path / "nowhere") == "WEIGHTS_UNUSABLE"
    assert refusal(setting, "v2", other_shape) == "WEIGHTS_UNUSABLE"
    assert refusal(setting, "v2", damaged) == "WEIGHTS_UNUSABLE"

    after = setting.client.generate(tokens_request(PROMPT, **FIELDS))
    assert after.token_ids == before.token_ids
    assert after.finished.cached_token_count > 0
    assert setting.client.info().model_version == "v1"
