"""What breaks does not spoil an answer, and nothing is left behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from prefixd.v1 import inspect_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.execution import PassRunner
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.sampling import Draw
from prefixd.worker.step import PassPlan
from tests.support.controller import (
    ControllerProcess,
    ControllerThread,
    controller_process,
    controller_thread,
    stubs,
)
from tests.support.pass_runners import FaultyRunner, GatedRunner
from tests.support.proxy import proxy
from tests.support.worker import (
    Client,
    WorkerThread,
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
from tests.support.worker import client as connect

LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
PROMPTS = [[seed * 7 % 200 + i for i in range(20 + seed)] for seed in range(5)]
FIELDS = {"token_count_max": 24, "ignore_end_of_sequence": True}


def config(controller_address: str, **changes: object) -> WorkerConfig:
    """A worker with a pool called tiny."""
    fields: dict[str, object] = {"controller": controller_address, "pool_name": "tiny"}
    return WorkerConfig(**(fields | {"limits": LIMITS} | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    """The undisturbed answers to all prompts."""
    with (
        controller_thread() as controller,
        worker_thread(config(controller.address), strict_runner(tiny_folder, block_count=256)) as (
            _,
            client,
        ),
    ):
        return answers_to_all(client)


def answers_to_all(client: Client) -> list[tuple[int, ...]]:
    """Asks all prompts at once."""
    streams = [client.worker.Generate(tokens_request(p, **FIELDS), timeout=90) for p in PROMPTS]
    return [collect(stream).token_ids for stream in streams]


def wrapped(
    wrap: Callable[[PassRunner], PassRunner],
) -> tuple[list[PassRunner], Callable[[PassRunner], PassRunner]]:
    """A wrapper, and the list that it puts its runner into."""
    made: list[PassRunner] = []

    def remember(inner: PassRunner) -> PassRunner:
        made.append(wrap(inner))
        return made[0]

    return made, remember


def test_failed_passes_change_no_answer(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """Every third pass fails, before or after it wrote: the answers are the undisturbed ones."""
    made, wrap = wrapped(lambda inner: FaultyRunner(inner, lambda number: number % 3 == 0))
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        worker_thread(config(controller.address), runner, wrap_runner=wrap) as (_, client),
        stubs(controller.address) as control,
    ):
        assert answers_to_all(client) == expected
        pool = wait_idle(control, "tiny")

    assert isinstance(made[0], FaultyRunner)
    assert made[0].broken_count >= 8
    assert pool.held_block_count == pool.pending_block_count == 0


def test_passes_that_fail_for_good_end_the_answers(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """After some tries the answer ends as INTERNAL_FAILURE; the worker goes on with the next."""
    _, wrap = wrapped(lambda inner: FaultyRunner(inner, lambda number: number <= 3))
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        worker_thread(config(controller.address), runner, wrap_runner=wrap) as (worker, client),
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


def test_logs_tell_neither_text_nor_tokens(tiny_folder: Path, controller: ControllerThread) -> None:
    """Even at debug, and where a pass fails, nothing of prompt or answer is written down."""
    _, wrap = wrapped(lambda inner: FaultyRunner(inner, lambda number: number == 2))
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(config(controller.address), runner, wrap_runner=wrap) as (worker, client):
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
    made, wrap = wrapped(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(config(controller.address), runner, wrap_runner=wrap) as (_, client):
        gate = made[0]
        assert isinstance(gate, GatedRunner)
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
    made, wrap = wrapped(GatedRunner)
    prompt = PROMPTS[0][:13]
    runner = strict_runner(tiny_folder, block_count=256)
    with worker_thread(config(controller.address), runner, wrap_runner=wrap) as (_, client):
        gate = made[0]
        assert isinstance(gate, GatedRunner)
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
        worker_thread(config(controller.address, limits=limits), runner) as (_, client),
        stubs(controller.address) as control,
    ):
        long = {"token_count_max": 1_900, "ignore_end_of_sequence": True}
        running = client.worker.Generate(tokens_request(PROMPTS[0], **long))
        next(running)
        waiting = client.worker.Generate(tokens_request(PROMPTS[1], **long))
        wait_until(lambda: client.info().waiting_sequence_count == 1)

        waiting.cancel()
        running.cancel()

        assert wait_idle(control, "tiny").held_block_count == 0
        info = client.info()
        assert (info.running_sequence_count, info.waiting_sequence_count) == (0, 0)
        assert info.decode_token_count < 1_900


def test_broken_streams_are_resumed_in_the_same_epoch(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """The connection is cut again and again within the lease; no answer notices."""
    runner = strict_runner(tiny_folder, block_count=256)
    with proxy(controller.address) as between:
        made, wrap = wrapped(
            lambda inner: CuttingRunner(inner, between.cut, pass_numbers=range(2, 30, 4))
        )
        with worker_thread(config(between.address), runner, wrap_runner=wrap) as (_, client):
            epoch = client.info().epoch
            assert answers_to_all(client) == expected
            client.wait_serving()
            assert client.info().epoch == epoch

    assert isinstance(made[0], CuttingRunner)
    assert made[0].cut_count >= 4


class CuttingRunner:
    """Cuts connections during some passes."""

    def __init__(self, inner: PassRunner, cut: Callable[[], int], *, pass_numbers: range) -> None:
        self._inner = inner
        self._cut = cut
        self._pass_numbers = pass_numbers
        self._pass_count = 0
        self.cut_count = 0

    def run(self, plan: PassPlan, draws: Sequence[Draw]) -> list[int]:
        """Runs the pass; the connection may be gone when it ends."""
        self._pass_count += 1
        if self._pass_count in self._pass_numbers:
            self.cut_count += self._cut()
        return self._inner.run(plan, draws)


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

        settings = config(between.address, limits=tight)
        with worker_thread(settings, runner, wrap_runner=wrap) as (_, client):
            assert answers_to_all(client) == expected
            assert client.info().preemption_count > 0
            assert wait_idle(control, "tiny").held_block_count == 0


def test_lost_lease_costs_no_answer(
    tiny_folder: Path, controller: ControllerThread, expected: list[tuple[int, ...]]
) -> None:
    """The connection is lost for longer than the lease: the worker registers again, and goes on."""
    made, wrap = wrapped(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    pool = inspect_pb2.GetPoolRequest(pool_name="tiny")
    with (
        proxy(controller.address) as between,
        stubs(controller.address) as control,
        worker_thread(config(between.address), runner, wrap_runner=wrap) as (worker, client),
    ):
        gate = made[0]
        assert isinstance(gate, GatedRunner)
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


def test_second_worker_waits_for_a_pool_that_is_driven(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A name in use is not taken over; the second is told so, and gets it once it is free."""
    first_runner = strict_runner(tiny_folder, block_count=64)
    second = WorkerThread(config(controller.address), strict_runner(tiny_folder, block_count=64))
    with worker_thread(config(controller.address), first_runner) as (_, client):
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
    made, wrap = wrapped(GatedRunner)
    runner = strict_runner(tiny_folder, block_count=256)
    with (
        controller_process("--listen", listen) as first,
        worker_thread(config(listen), runner, wrap_runner=wrap) as (_, client),
    ):
        gate = made[0]
        assert isinstance(gate, GatedRunner)
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
        settings = config(process.address, controller_wait_s=0.3)
        runner = strict_runner(tiny_folder, block_count=512)
        with worker_thread(settings, runner) as (_, client):
            long = {"token_count_max": 1_900, "ignore_end_of_sequence": True}
            stream = client.worker.Generate(tokens_request(PROMPTS[0], **long))
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
            long = {"token_count_max": 1_900, "ignore_end_of_sequence": True}
            stream = client.worker.Generate(tokens_request(PROMPTS[0], **long))
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
