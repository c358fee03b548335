"""The worker process: everything is wired here and nowhere else."""

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from typing import TypeAlias

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from prefixd.v1 import worker_pb2, worker_pb2_grpc
from prefixd.worker.config import WorkerConfig
from prefixd.worker.engine import Engine
from prefixd.worker.errors import WorkerBroken
from prefixd.worker.execution import ModelPassRunner, PassRunner, Runner
from prefixd.worker.limits import MESSAGE_BYTES_MAX
from prefixd.worker.logs import Log
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.weights import ModelWeights
from prefixd.worker.plan_check import PoolShape
from prefixd.worker.prompt import PromptReader
from prefixd.worker.reload import WeightReloader
from prefixd.worker.rpc.controller_client import (
    ControllerClient,
    PoolDescription,
    PoolRefused,
)
from prefixd.worker.rpc.generate_request import AnswerBounds
from prefixd.worker.rpc.generation_factory import GenerationFactory
from prefixd.worker.rpc.interceptor import ErrorInterceptor
from prefixd.worker.rpc.listening import Listening
from prefixd.worker.rpc.worker_service import WorkerDescription, WorkerService

SHUTDOWN_GRACE_S = 1.0
"""How long calls may go on once the process is told to end; their answers end at once."""
PASS_TIMEOUT_S = 1.0
"""How long the end of the process waits for a forward pass that is under way."""
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
SERVER_OPTIONS = (
    # A second worker must fail to start instead of taking every other connection.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


Watch: TypeAlias = Callable[[], Coroutine[None, None, None]]
"""Raises once something has ended that the worker cannot do without."""


class Server:
    """A worker that can be started and stopped once.

    Invariants: after `start` every address of `addresses` answers, and health tells SERVING while a
    session with the controller is open; after `stop` nothing answers and the pool is given back.
    """

    def __init__(
        self,
        grpc_server: grpc.aio.Server,
        *,
        config: WorkerConfig,
        engine: Engine,
        client: ControllerClient,
        health: HealthServicer,
        watches: Sequence[Watch],
        log: Log,
    ) -> None:
        self.engine = engine
        self.client = client
        self._grpc_server = grpc_server
        self._config = config
        self._health = health
        self._watches = watches
        self._log = log
        self._listening = Listening()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it serves."""
        return self._listening.addresses

    async def start(self) -> None:
        """Binds and serves, then looks for the controller.

        Raises:
            AddressUnusable: an address cannot be served.
            TlsUnusable: a PEM file cannot be read.
        """
        tls = self._config.tls
        credentials = tls.credentials() if tls is not None else None
        self._listening.bind(self._grpc_server, self._config.listen, credentials)
        await self._set_serving(is_serving=False)
        await self._grpc_server.start()
        self._log.info("worker_started", addresses=self.addresses)
        self._tasks = [
            asyncio.create_task(self.client.run(self.addresses[0])),
            asyncio.create_task(self.engine.run()),
            asyncio.create_task(self._follow_readiness()),
            *(asyncio.create_task(watch()) for watch in self._watches),
        ]

    async def broken(self) -> Exception:
        """Waits until a part of the worker has ended by itself, which none may; returns why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        error = next(iter(done)).exception()
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, Exception), "only an error ends them"
        return error

    async def stop(self) -> bool:
        """Ends all answers, gives the pool back and stops serving.

        Returns:
            Whether the forward pass that was under way has ended, too.
        """
        self._log.info("worker_stopping")
        await self._health.enter_graceful_shutdown()
        self.engine.drain()
        await self._grpc_server.stop(SHUTDOWN_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.release()
        await self.client.close()
        is_idle = await self.engine.close(timeout_s=PASS_TIMEOUT_S)
        self._listening.release()
        self._log.info("worker_stopped")
        return is_idle

    async def _follow_readiness(self) -> None:
        while True:
            await self.client.ready()
            await self._set_serving(is_serving=True)
            await self.client.lost()
            await self._set_serving(is_serving=False)

    async def _set_serving(self, *, is_serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


def build(
    config: WorkerConfig,
    runner: Runner,
    *,
    log: Log,
    attention_backend: str,
    wrap_runner: Callable[[PassRunner], PassRunner] = lambda runner: runner,
    watches: Sequence[Watch] = (),
) -> Server:
    """Wires a worker around a loaded model.

    Args:
        config: of the worker.
        runner: the model and its pool; nobody else may use it.
        log: for lifecycle events.
        attention_backend: name of the runner's backend, for clients.
        wrap_runner: puts something around each forward pass: a measurement, or a fault.
        watches: each raises once something that the worker cannot do without has ended.
    """
    model, kv = runner.model, runner.kv
    shape = PoolShape(
        kv.block_count,
        kv.block_size,
        sub_block_reuse=config.sub_block_reuse,
        groups=model.groups,
    )
    client = ControllerClient(
        config.controller, _pool_description(config, runner), log, tls=config.controller_tls
    )
    engine = Engine(
        client,
        wrap_runner(ModelPassRunner(runner)),
        shape=shape,
        limits=config.limits,
        model_version=config.model_version,
        controller_wait_s=config.controller_wait_s,
        clock_s=time.monotonic,
        log=log,
    )
    reader = PromptReader(model.tokenizer, vocabulary_size=model.vocabulary_size)
    bounds = AnswerBounds(
        context_token_count_max=model.context_token_count_max,
        slot_count=shape.token_count_max(chunk_token_count_max=config.limits.chunk_token_count_max),
        end_token_ids=model.end_token_ids,
    )
    service = WorkerService(
        engine,
        client,
        reader,
        GenerationFactory(reader, bounds, model.lora.identities, clock_s=time.monotonic),
        WeightReloader(engine, ModelWeights(model), log),
        _worker_description(config, runner, shape, attention_backend),
    )
    health = HealthServicer()
    grpc_server = grpc.aio.server(interceptors=[ErrorInterceptor(log)], options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc_server)
    health_pb2_grpc.add_HealthServicer_to_server(health, grpc_server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection(
        (SERVICE_NAME, health_name, reflection.SERVICE_NAME), grpc_server
    )
    return Server(
        grpc_server,
        config=config,
        engine=engine,
        client=client,
        health=health,
        watches=watches,
        log=log,
    )


async def serve(server: Server, *, on_started: Callable[[tuple[str, ...]], None], log: Log) -> bool:
    """Runs a worker until SIGTERM or SIGINT, then stops it.

    Returns:
        Whether the last forward pass has ended.

    Raises:
        AddressUnusable: an address cannot be served.
        PoolRefused: the controller will never take the pool.
        WorkerBroken: a part of it ended, which none may.
    """
    loop = asyncio.get_running_loop()
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    await server.start()
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    on_started(server.addresses)
    told, broken = asyncio.create_task(told_to_end.wait()), asyncio.create_task(server.broken())
    await asyncio.wait((told, broken), return_when=asyncio.FIRST_COMPLETED)
    error = broken.result() if broken.done() else None
    told.cancel()
    broken.cancel()
    is_idle = await server.stop()
    if isinstance(error, PoolRefused | WorkerBroken):
        raise error
    if error is not None:
        log.error("worker_broken", exc_info=error)
        raise WorkerBroken("the worker broke; its log holds the cause") from error
    return is_idle


def _pool_description(config: WorkerConfig, runner: Runner) -> PoolDescription:
    model, kv = runner.model, runner.kv
    return PoolDescription(
        pool_name=config.pool_name,
        model_name=model.name,
        block_count=kv.block_count,
        block_size=kv.block_size,
        groups=model.groups,
        kv_format=_kv_format(kv, model.rank_count),
        vocabulary_size=model.vocabulary_size,
        model_version=config.model_version,
        sub_block_reuse=config.sub_block_reuse,
        merge_duplicates=config.merge_duplicates,
        eviction_policy=config.eviction_policy,
        lease_ms=config.lease_ms,
    )


def _worker_description(
    config: WorkerConfig, runner: Runner, shape: PoolShape, attention_backend: str
) -> WorkerDescription:
    model, kv = runner.model, runner.kv
    return WorkerDescription(
        version=_version(),
        model_name=model.name,
        pool_name=config.pool_name,
        controller_address=config.controller,
        attention_backend=attention_backend,
        device=str(model.device),
        dtype=_dtype_name(model.dtype),
        kv_dtype=_dtype_name(kv.dtype),
        token_byte_count=model.rank_count * len(model.groups) * kv.slot_byte_count,
        rank_count=model.rank_count,
        block_count=shape.block_count,
        block_size=shape.block_size,
        context_token_count_max=model.context_token_count_max,
        vocabulary_size=model.vocabulary_size,
        chunk_token_count_max=config.limits.chunk_token_count_max,
        loras=model.lora.identities,
    )


def _kv_format(kv: PagedKv, rank_count: int) -> str:
    """Names what a page holds: two pools with one name could exchange blocks."""
    whole = f"{_dtype_name(kv.dtype)} slot-major"
    if kv.is_quantized:
        whole += ", a scale per token and head"
    return whole if rank_count == 1 else f"{whole}, heads over {rank_count} ranks"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version() -> str:
    try:
        return metadata.version("prefixd")
    except metadata.PackageNotFoundError:
        return "unknown"
