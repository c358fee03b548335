"""Real workers for tests: one in this process, one in a process of its own.

`WorkerThread` runs the event loop of an in-process worker in a thread, so that tests stay
synchronous. `WorkerProcess` is `python -m prefixd.worker`, to be signalled and killed. `Client`
calls either over gRPC.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from prefixd.v1 import inspect_pb2, worker_pb2, worker_pb2_grpc
from prefixd.worker.config import ModelConfig, WorkerConfig
from prefixd.worker.execution import PassRunner
from prefixd.worker.logs import json_logger
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model_setup import load_runner
from prefixd.worker.server import Server, build
from tests.support.controller import Stubs
from tests.support.server_process import ServerProcess

TIMEOUT_S = 60.0
ANY_PORT = ("127.0.0.1:0",)


@dataclass(frozen=True)
class Generated:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    started: worker_pb2.GenerateStarted
    finished: worker_pb2.GenerateFinished
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass
class Client:
    """Synchronous stubs of a worker on one channel."""

    channel: grpc.Channel
    worker: Any = field(init=False)
    health: Any = field(init=False)

    def __post_init__(self) -> None:
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def generate(self, request: worker_pb2.GenerateRequest) -> Generated:
        """Waits for a whole answer."""
        return collect(self.worker.Generate(request, timeout=TIMEOUT_S))

    def info(self) -> worker_pb2.GetWorkerInfoResponse:
        """The worker's description."""
        response: worker_pb2.GetWorkerInfoResponse = self.worker.GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest(), timeout=TIMEOUT_S
        )
        return response

    def wait_serving(self) -> None:
        """Waits until health tells that the pool is registered."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
        raise AssertionError("health ended")


def collect(responses: Any) -> Generated:
    """Reads an answer to its end."""
    (answer,) = collect_samples(responses)
    return answer


def collect_samples(responses: Any) -> list[Generated]:
    """Reads all answers of one request to their end, in order."""
    started: list[worker_pb2.GenerateStarted] = []
    finished: dict[int, worker_pb2.GenerateFinished] = {}
    texts: defaultdict[int, list[str]] = defaultdict(list)
    token_ids: defaultdict[int, list[int]] = defaultdict(list)
    logprobs: tuple[float, ...] | None = None
    for response in responses:
        match response.WhichOneof("part"):
            case "started":
                started.append(response.started)
            case "prompt_logprobs":
                assert logprobs is None
                assert not texts
                logprobs = tuple(response.prompt_logprobs.logprobs)
            case "chunk":
                assert response.chunk.sample_index not in finished
                texts[response.chunk.sample_index].append(response.chunk.text)
                token_ids[response.chunk.sample_index] += response.chunk.token_ids
            case "finished":
                assert response.finished.sample_index not in finished
                finished[response.finished.sample_index] = response.finished
    (one_started,) = started
    assert sorted(finished) == list(range(len(finished)))
    return [
        Generated(
            "".join(texts[index]),
            tuple(token_ids[index]),
            tuple(texts[index]),
            one_started,
            finished[index],
            logprobs,
        )
        for index in range(len(finished))
    ]


@contextmanager
def client(address: str) -> Iterator[Client]:
    """Opens a channel to a worker for the length of the block."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield Client(channel)


def error_reason(error: grpc.RpcError) -> str:
    """The reason of a failed call's only ErrorInfo."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    infos = [d for d in status.details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    (detail,) = infos
    info = error_details_pb2.ErrorInfo()
    detail.Unpack(info)
    assert info.domain == "prefixd"
    return str(info.reason)


def tokens_request(token_ids: Sequence[int], **fields: Any) -> worker_pb2.GenerateRequest:
    """A request whose prompt is token ids."""
    prompt = worker_pb2.Prompt(tokens=worker_pb2.TokenIds(token_ids=token_ids))
    return worker_pb2.GenerateRequest(prompt=prompt, **fields)


def text_request(text: str, **fields: Any) -> worker_pb2.GenerateRequest:
    """A request whose prompt is plain text."""
    return worker_pb2.GenerateRequest(prompt=worker_pb2.Prompt(text=text), **fields)


def wait_idle(control: Stubs, pool_name: str) -> inspect_pb2.Pool:
    """Waits until no sequence of the pool is open: closes travel behind an answer's last part."""
    request = inspect_pb2.GetPoolRequest(pool_name=pool_name)

    def pool() -> inspect_pb2.Pool:
        shown: inspect_pb2.Pool = control.inspect.GetPool(request).pool
        return shown

    wait_until(lambda: pool().sequence_count == 0)
    return pool()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Asks again and again, where no event tells."""
    deadline = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be in time"
        pause.wait(0.01)


class WorkerThread:
    """An in-process worker on a port of its own."""

    def __init__(
        self,
        config: WorkerConfig,
        runner: ModelRunner,
        *,
        wrap_runner: Callable[[PassRunner], PassRunner] = lambda runner: runner,
    ) -> None:
        self.log_text = io.StringIO()
        self.server: Server
        self._config = replace(config, listen=ANY_PORT)
        self._runner = runner
        self._wrap_runner = wrap_runner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self._failure: Exception | None = None

    @property
    def address(self) -> str:
        """The first address."""
        return self.server.addresses[0]

    @property
    def log_events(self) -> list[dict[str, Any]]:
        """Every log line so far."""
        return [json.loads(line) for line in self.log_text.getvalue().splitlines()]

    def start(self) -> None:
        """Starts the thread and returns once the address answers."""
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def wait_broken(self) -> Exception:
        """Waits until a part of the worker has ended by itself; returns why."""
        return asyncio.run_coroutine_threadsafe(self.server.broken(), self._loop).result(TIMEOUT_S)

    def stop(self) -> None:
        """Stops the worker and its thread."""
        if self._failure is None:
            asyncio.run_coroutine_threadsafe(self.server.stop(), self._loop).result(TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except Exception as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self.server = build(
            self._config,
            self._runner,
            log=json_logger("debug", stream=self.log_text),
            attention_backend="strict",
            wrap_runner=self._wrap_runner,
        )
        await self.server.start()


def strict_runner(
    folder: Path,
    *,
    block_count: int,
    block_size: int = 4,
    loras: tuple[LoraIdentity, ...] = (),
    kv_dtype: str = "auto",
) -> ModelRunner:
    """Loads a model on the strict backend, with a pool of its own."""
    config = ModelConfig(
        model=str(folder),
        attention_backend="strict",
        device="cpu",
        block_size=block_size,
        block_count=block_count,
        loras=loras,
        kv_dtype=kv_dtype,
    )
    return load_runner(config, report=print)


@contextmanager
def worker_thread(
    config: WorkerConfig,
    runner: ModelRunner,
    *,
    wrap_runner: Callable[[PassRunner], PassRunner] = lambda runner: runner,
) -> Iterator[tuple[WorkerThread, Client]]:
    """Runs an in-process worker for the length of the block; its pool is registered."""
    worker = WorkerThread(config, runner, wrap_runner=wrap_runner)
    worker.start()
    try:
        with client(worker.address) as calls:
            calls.wait_serving()
            yield worker, calls
    finally:
        worker.stop()


class WorkerProcess(ServerProcess):
    """A worker in a process of its own."""

    def __init__(self, *options: str, environment: dict[str, str] | None = None) -> None:
        super().__init__(
            "prefixd.worker",
            *options,
            environment=os.environ | (environment or {}),
            timeout_s=TIMEOUT_S,
        )


@contextmanager
def worker_process(
    *options: str, environment: dict[str, str] | None = None
) -> Iterator[WorkerProcess]:
    """Runs a worker process on port 0 for the length of the block; see `Client.wait_serving`."""
    worker = WorkerProcess("--listen", "127.0.0.1:0", *options, environment=environment)
    try:
        worker.wait_started()
        yield worker
    finally:
        worker.close()
