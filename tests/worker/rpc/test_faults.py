"""What breaks does not spoil an answer, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2

from prefixd.v1 import inspect_pb2
from prefixd.worker.execution import DeviceLost
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.reading import LogitRead
from prefixd.worker.step import PassPlan
from tests.support.controller import (
    ControllerThread,
    stubs,
)
from tests.support.pass_runners import FaultyRunner, GatedRunner, Wrapping
from tests.support.worker import client as connect
from tests.support.worker import (
    collect,
    error_reason,
    strict_runner,
    text_request,
    tokens_request,
    wait_idle,
    wait_until,
    worker_process,
    worker_thread,
)
from tests.worker.rpc.disturbances import FIELDS, LONG, PROMPTS, answers_to_all, tiny_config


def test_failed_passes_change_no_answer(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """Every third pass fails, before or after it wrote: the answers are the undisturbed ones."""
    wrap = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 3 == 0))
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        worker_thread(tiny_config(controller.address), runner, wrap_runner=wrap) as (_, client),
        stubs(controller.address) as control,
    ):
        assert answers_to_all(client) == expected
        pool = wait_idle(control, "tiny")

    assert wrap.runner.broken_count >= 8
    assert pool.held_block_count == pool.pending_block_count == 0


def test_passes_that_fail_for_good_end_the_answers(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """After some tries the answer ends as INTERNAL_FAILURE; the worker goes on with the next."""
    wrap = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number <= 3))
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        worker_thread(tiny_config(controller.address), runner, wrap_runner=wrap) as (
            worker,
            client,
        ),
        stubs(controller.address) as control,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(tokens_request(PROMPTS[0], **FIELDS))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert error_reason(caught.value) == "INTERNAL_FAILURE"
        assert "PassBroken" not in caught.value.details()
        assert len(client.generate(tokens_request(PROMPTS[0], **FIELDS)).token_ids) == 24
        assert wait_idle(control, "tiny").held_block_count == 0
        assert sum(e["event"] == "pass_failed" for e in worker.log_events) == 3


class LostDevice:
    """A runner of passes whose device is gone."""

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> NoReturn:
        """Fails."""
        raise DeviceLost("cuda:0 does not work any more")


def test_a_lost_device_ends_the_worker(tiny_folder: Path, controller: ControllerThread) -> None:
    """Else it would be asked, and fail, for ever."""
    runner = strict_runner(tiny_folder, block_count=64)
    with worker_thread(
        tiny_config(controller.address), runner, wrap_runner=lambda _: LostDevice()
    ) as (worker, client):
        answer = client.worker.Generate(tokens_request(PROMPTS[0], **FIELDS), timeout=60)

        assert isinstance(worker.wait_broken(), DeviceLost)
        answer.cancel()


def test_logs_tell_neither_text_nor_tokens(tiny_folder: Path, controller: ControllerThread) -> None:
    """Even at debug, and where a pass fails, nothing of prompt or answer is written down."""
    wrap = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number == 2))
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(tiny_config(controller.address), runner, wrap_runner=wrap) as (
        worker,
        client,
    ):
        answer = client.generate(text_request("Quagga", **FIELDS))
        client.generate(tokens_request([201, 202, 203], **FIELDS))
        log = worker.log_text.getvalue()

    assert "pass_failed" in log
    assert "Quagga" not in log
    assert "201, 202" not in log
    assert ", ".join(map(str, answer.token_ids[:3])) not in log


def test_health_answers_while_a_forward_runs(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A pass stands still; health and the worker's description answer all the same."""
    wrap = Wrapping(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(tiny_config(controller.address), runner, wrap_runner=wrap) as (_, client):
        gate = wrap.runner
        gate.close()
        stream = client.worker.Generate(tokens_request(PROMPTS[0], **FIELDS))
        gate.wait_held()

        check = client.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        running_count = client.info().running_sequence_count
        gate.open()

        assert check.status == health_pb2.HealthCheckResponse.SERVING
        assert running_count == 1
        assert len(collect(stream).token_ids) == 24


def test_joiner_with_a_rest_of_one_token_runs_in_its_writers_pass(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S10: the joiner reads what the writer stores in the same pass; both answers are the same."""
    wrap = Wrapping(GatedRunner)
    prompt = PROMPTS[0][:13]
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(tiny_config(controller.address), runner, wrap_runner=wrap) as (_, client):
        gate = wrap.runner
        alone = client.generate(tokens_request(prompt, skip_cache_read=True, **FIELDS))
        gate.close()
        other = client.worker.Generate(tokens_request(PROMPTS[1], **FIELDS))
        gate.wait_held()
        salted = {"cache_salt": "fresh"}
        streams = [
            client.worker.Generate(tokens_request(prompt, **FIELDS, **salted)) for _ in range(2)
        ]
        wait_until(lambda: client.info().waiting_sequence_count == 2)
        gate.plans.clear()
        gate.open()
        answers = [collect(stream) for stream in streams]
        collect(other)

    chunks = [chunk for chunk in gate.plans[0].chunks if chunk.sequence.cache_salt]
    assert [(c.start_position, len(c.token_ids)) for c in chunks] == [(0, 13), (12, 1)]
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * 2


def test_cancelled_answer_leaves_no_held_block(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A client that goes away in the middle, or while it waits, closes its sequence."""
    limits = SchedulerLimits(running_sequence_count_max=1)
    runner = strict_runner(tiny_folder, block_count=512)
    with (
        worker_thread(tiny_config(controller.address, limits=limits), runner) as (_, client),
        stubs(controller.address) as control,
    ):
        running = client.worker.Generate(tokens_request(PROMPTS[0], **LONG))
        next(running)
        waiting = client.worker.Generate(tokens_request(PROMPTS[1], **LONG))
        wait_until(lambda: client.info().waiting_sequence_count == 1)

        waiting.cancel()
        running.cancel()

        assert wait_idle(control, "tiny").held_block_count == 0
        info = client.info()
        assert (info.running_sequence_count, info.waiting_sequence_count) == (0, 0)
        assert info.decode_token_count < 1_900


def test_killed_worker_holds_nothing_once_its_lease_has_run_out(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A worker killed in the middle of an answer: its pool ends with its lease."""
    options = ("--model", str(tiny_folder), "--controller", controller.address)
    sizes = ("--pool-name", "tiny", "--block-count", "512", "--lease-ms", "1000")
    with (
        worker_process(*options, *sizes) as worker,
        stubs(controller.address) as control,
    ):
        with connect(worker.address) as client:
            client.wait_serving()
            stream = client.worker.Generate(tokens_request(PROMPTS[0], **LONG))
            next(stream)
            worker.process.kill()
            worker.wait_ended()

        request = inspect_pb2.GetPoolRequest(pool_name="tiny")
        wait_until(lambda: not control.inspect.GetPool(request).pool.session_active)
        assert control.inspect.GetPool(request).pool.held_block_count > 0
        controller.expire_leases(advance_ms=1_001)
        with pytest.raises(grpc.RpcError) as gone:
            control.inspect.GetPool(request)
        assert gone.value.code() == grpc.StatusCode.NOT_FOUND
