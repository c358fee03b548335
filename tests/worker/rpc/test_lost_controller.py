"""Connections, leases and controllers are lost under a live worker."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from prefixd.v1 import inspect_pb2
from prefixd.worker.execution import PassRunner
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import (
    ControllerProcess,
    ControllerThread,
    controller_process,
    stubs,
)
from tests.support.pass_runners import CuttingRunner, FaultyRunner, GatedRunner, Wrapping
from tests.support.proxy import proxy
from tests.support.worker import (
    WorkerThread,
    collect,
    error_reason,
    strict_runner,
    tokens_request,
    wait_idle,
    wait_until,
    worker_thread,
)
from tests.support.worker import client as connect
from tests.worker.rpc.disturbances import FIELDS, LONG, PROMPTS, answers_to_all, tiny_config


def test_broken_streams_are_resumed_in_the_same_epoch(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """The connection is cut again and again within the lease; no answer notices."""
    runner = strict_runner(tiny_folder, block_count=256)
    with proxy(controller.address) as between:
        wrap = Wrapping(
            lambda inner: CuttingRunner(inner, between.cut, pass_numbers=range(2, 30, 4))
        )
        with worker_thread(tiny_config(between.address), runner, wrap_runner=wrap) as (_, client):
            epoch = client.info().epoch
            assert answers_to_all(client) == expected
            client.wait_serving()
            assert client.info().epoch == epoch

    assert wrap.runner.cut_count >= 4


def test_trouble_of_all_kinds_at_once_changes_no_answer(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """A pool that is too small, passes that fail, a connection that is cut: the same answers."""
    tight = SchedulerLimits(chunk_token_count_max=8, token_budget=80)
    # The longest of the five computes 47 positions: 12 blocks of 4. Together they want 56.
    runner = strict_runner(tiny_folder, block_count=28)
    with proxy(controller.address) as between, stubs(controller.address) as control:

        def wrap(inner: PassRunner) -> PassRunner:
            cutting = CuttingRunner(inner, between.cut, pass_numbers=range(5, 200, 17))
            return FaultyRunner(cutting, lambda number: number % 7 == 0)

        settings = tiny_config(between.address, limits=tight)
        with worker_thread(settings, runner, wrap_runner=wrap) as (_, client):
            assert answers_to_all(client) == expected
            assert client.info().preemption_count > 0
            assert wait_idle(control, "tiny").held_block_count == 0


def test_lost_lease_costs_no_answer(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """The connection is lost for longer than the lease: the worker registers again, and goes on."""
    wrap = Wrapping(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    pool = inspect_pb2.GetPoolRequest(pool_name="tiny")
    with (
        proxy(controller.address) as between,
        stubs(controller.address) as control,
        worker_thread(tiny_config(between.address), runner, wrap_runner=wrap) as (worker, client),
    ):
        gate = wrap.runner
        epoch = client.info().epoch
        streams = [client.worker.Generate(tokens_request(p, **FIELDS)) for p in PROMPTS]
        for stream in streams:
            next(stream)
        gate.close()
        gate.wait_held()
        between.pause()
        wait_until(lambda: not control.inspect.GetPool(pool).pool.session_active)
        controller.expire_leases(advance_ms=600_001)
        between.resume()
        gate.open()

        answers = [
            tuple(t for response in stream for t in response.chunk.token_ids) for stream in streams
        ]

        assert answers == expected
        assert client.info().epoch != epoch
        assert any(event["event"] == "epoch_ended" for event in worker.log_events)


def test_request_that_comes_while_the_connection_is_broken_waits_for_it(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """A short break refuses nobody: the answer begins when the session is back."""
    runner = strict_runner(tiny_folder, block_count=256)
    check = health_pb2.HealthCheckRequest()
    serving = health_pb2.HealthCheckResponse.SERVING
    with (
        proxy(controller.address) as between,
        worker_thread(tiny_config(between.address), runner) as (_, client),
    ):
        between.pause()
        wait_until(lambda: client.health.Check(check).status != serving)
        stream = client.worker.Generate(tokens_request(PROMPTS[0], **FIELDS))
        wait_until(lambda: client.info().waiting_sequence_count == 1)
        between.resume()
        assert collect(stream).token_ids == expected[0]


def test_second_worker_waits_for_a_pool_that_is_driven(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A name in use is not taken over; the second is told so, and gets it once it is free."""
    first_runner = strict_runner(tiny_folder, block_count=64)
    second = WorkerThread(
        tiny_config(controller.address), strict_runner(tiny_folder, block_count=64)
    )
    with worker_thread(tiny_config(controller.address), first_runner) as (_, client):
        second.start()
        wait_until(lambda: any(e.get("reason") == "POOL_IN_USE" for e in second.log_events))
        assert len(client.generate(tokens_request(PROMPTS[0], **FIELDS)).token_ids) == 24
    try:
        with connect(second.address) as client:
            client.wait_serving()
            assert len(client.generate(tokens_request(PROMPTS[0], **FIELDS)).token_ids) == 24
    finally:
        second.stop()


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_killed_controller_is_replaced_under_running_answers(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    """The worker registers with the new one and its answers go on, the same as undisturbed."""
    listen = f"127.0.0.1:{free_port()}"
    wrap = Wrapping(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        controller_process("--listen", listen) as first,
        worker_thread(tiny_config(listen), runner, wrap_runner=wrap) as (_, client),
    ):
        gate = wrap.runner
        epoch = client.info().epoch
        streams = [client.worker.Generate(tokens_request(p, **FIELDS)) for p in PROMPTS]
        for stream in streams:
            next(stream)
        gate.close()
        gate.wait_held()
        first.process.kill()
        first.wait_ended()
        with controller_process("--listen", listen) as second:
            gate.open()
            answers = [
                tuple(t for response in stream for t in response.chunk.token_ids)
                for stream in streams
            ]
            assert answers == expected
            assert client.info().epoch != epoch
            with stubs(second.address) as control:
                assert wait_idle(control, "tiny").held_block_count == 0


def test_controller_that_stays_away_ends_the_answers(tiny_folder: Path) -> None:
    """After the wait a running answer ends as CONTROLLER_UNAVAILABLE, and new ones at once."""
    process = ControllerProcess("--listen", "127.0.0.1:0")
    try:
        process.wait_started()
        settings = tiny_config(process.address, controller_wait_s=0.3)
        runner = strict_runner(tiny_folder, block_count=512)
        with worker_thread(settings, runner) as (_, client):
            stream = client.worker.Generate(tokens_request(PROMPTS[0], **LONG))
            next(stream)
            process.close()

            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            with pytest.raises(grpc.RpcError) as refused:
                client.generate(tokens_request(PROMPTS[0], **FIELDS))

        for error in (caught.value, refused.value):
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert error_reason(error) == "CONTROLLER_UNAVAILABLE"
    finally:
        process.close()
