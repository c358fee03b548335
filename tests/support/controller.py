"""Real controllers for tests: one in this process, one in a process of its own.

`ControllerThread` runs the event loop of an in-process server in a thread, so that tests stay
synchronous and can still look at the core; its clock only moves when a test moves it.
`ControllerProcess` is `python -m prefixd.controller`, to be signalled and killed.
"""

import asyncio
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from prefixd.controller.addresses import Address, TcpAddress
from prefixd.controller.config import Config
from prefixd.controller.logs import json_logger
from prefixd.controller.server import Server, build
from prefixd.v1 import admin_pb2_grpc, cache_pb2_grpc, inspect_pb2_grpc, pool_pb2_grpc
from tests.support.server_process import ServerProcess

T = TypeVar("T")

START_TIMEOUT_S = 30.0
ANY_PORT: tuple[Address, ...] = (TcpAddress(host="127.0.0.1", port=0),)
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)


class ManualClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        """Says what time it is."""
        return self.now_ms

    def advance(self, milliseconds: int) -> None:
        """Moves the clock forward."""
        self.now_ms += milliseconds


@dataclass
class Stubs:
    """Synchronous stubs of all services on one channel."""

    channel: grpc.Channel
    cache: Any = field(init=False)
    pool: Any = field(init=False)
    inspect: Any = field(init=False)
    admin: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.pool = pool_pb2_grpc.PoolServiceStub(self.channel)
        self.inspect = inspect_pb2_grpc.InspectServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)


@contextmanager
def stubs(address: str) -> Iterator[Stubs]:
    """Opens a channel to a controller for the length of the block."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield Stubs(channel)


class ControllerThread:
    """An in-process controller on a port of its own."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config(listen=ANY_PORT)
        self.clock = ManualClock()
        self.log_text = io.StringIO()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self._failure: Exception | None = None
        self.server: Server

    @property
    def address(self) -> str:
        """The first address."""
        return self.server.addresses[0]

    @property
    def log_events(self) -> list[dict[str, Any]]:
        """Every log line so far."""
        return [json.loads(line) for line in self.log_text.getvalue().splitlines()]

    def start(self) -> None:
        """Starts the thread and returns once every address answers."""
        self._thread.start()
        assert self._started.wait(START_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stops the server and its thread; one that is stopped stays so."""
        if self._loop.is_closed():
            return
        if self._failure is None:
            asyncio.run_coroutine_threadsafe(self.server.stop(), self._loop).result(START_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function between two events of the server's loop; returns its result."""

        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(START_TIMEOUT_S)

    def drain(self) -> None:
        """Drains the server, which goes on answering what is no new work."""
        asyncio.run_coroutine_threadsafe(self.server.drain(), self._loop).result(START_TIMEOUT_S)

    def expire_leases(self, *, advance_ms: int) -> None:
        """Moves the clock and lets the leases that ran out end."""
        self.call(lambda: self.clock.advance(advance_ms))
        self.call(self.server.expire_leases)

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
        log = json_logger("debug", stream=self.log_text)
        self.server = build(self.config, log=log, clock=self.clock)
        await self.server.start()


@contextmanager
def controller_thread(config: Config | None = None) -> Iterator[ControllerThread]:
    """Runs an in-process controller for the length of the block."""
    controller = ControllerThread(config)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()


class ControllerProcess(ServerProcess):
    """A controller in a process of its own."""

    def __init__(self, *options: str, environment: dict[str, str] | None = None) -> None:
        super().__init__(
            "prefixd.controller",
            *options,
            environment=_user_environment() | (environment or {}),
            timeout_s=START_TIMEOUT_S,
        )


def _user_environment() -> dict[str, str]:
    """The environment without what the test run sets for itself."""
    return {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}


@contextmanager
def controller_process(
    *options: str, environment: dict[str, str] | None = None
) -> Iterator[ControllerProcess]:
    """Runs a controller process on port 0, or with the given options, for the block's length."""
    controller = ControllerProcess(
        *(options or ("--listen", "127.0.0.1:0")), environment=environment
    )
    try:
        controller.wait_started()
        yield controller
    finally:
        controller.close()
