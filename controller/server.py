"""The controller process: everything is wired here and nowhere else."""

import asyncio
import gc
import os
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Sequence
from importlib import metadata

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from structlog.typing import FilteringBoundLogger

from prefixd.controller.addresses import (
    Address,
    AddressUnavailable,
    SocketLock,
    TcpAddress,
    UnixAddress,
    bind_obstacle,
)
from prefixd.controller.clock import Clock, monotonic_ms
from prefixd.controller.config import Config, ConfigInvalid, TlsConfig
from prefixd.controller.core.errors import Draining
from prefixd.controller.core.hashing import HASHES, Hasher, choose_seed
from prefixd.controller.core.limits import MESSAGE_BYTES_MAX
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.admin_service import AdminService
from prefixd.controller.rpc.cache_service import CacheService
from prefixd.controller.rpc.epochs import Epochs
from prefixd.controller.rpc.hashing import SlicedHashing
from prefixd.controller.rpc.inspect_service import InspectService
from prefixd.controller.rpc.interceptor import ErrorInterceptor
from prefixd.controller.rpc.pool_service import PoolService
from prefixd.controller.rpc.serving import Serving
from prefixd.controller.rpc.sessions import OpenSessions
from prefixd.controller.rpc.steps import StepRunner
from prefixd.controller.rpc.watchers import Watchers
from prefixd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    inspect_pb2,
    inspect_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
)

LEASE_TICK_S = 0.05
"""How often leases are looked at: half of the shortest lease."""
SHUTDOWN_GRACE_S = 2.0
"""How long calls in flight may go on once the process is told to end."""
SESSION_TOKEN_BYTES = 16
SEED_BYTES = 32
SERVER_OPTIONS = (
    # A second controller must fail to start instead of taking every other connection.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A driver whose machine vanished is noticed within 15 seconds; then its lease runs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Drivers ping too while their sessions are idle.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
SERVICE_NAMES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (admin_pb2, "AdminService"),
        (cache_pb2, "CacheService"),
        (inspect_pb2, "InspectService"),
        (pool_pb2, "PoolService"),
    )
)


class Server:
    """A controller that can be started and stopped once.

    Invariants: after `start` every address of `addresses` answers; after `stop` no session is open,
    no address answers, and no socket file is left.
    """

    def __init__(
        self,
        grpc_server: grpc.aio.Server,
        *,
        config: Config,
        registry: PoolRegistry,
        hashing: SlicedHashing,
        epochs: Epochs,
        sessions: OpenSessions,
        watchers: Watchers,
        serving: Serving,
        health: HealthServicer,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self.registry = registry
        self.hashing = hashing
        self.addresses: tuple[str, ...] = ()
        self._grpc_server = grpc_server
        self._config = config
        self._epochs = epochs
        self._sessions = sessions
        self.watchers = watchers
        self._serving = serving
        self._health = health
        self._clock = clock
        self._log = log
        self._locks: list[SocketLock] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds every address, or none, and serves. Raises ConfigInvalid or AddressUnavailable."""
        credentials = _credentials(self._config.tls)
        try:
            self.addresses = tuple(self._bind(one, credentials) for one in self._config.listen)
        except Exception:
            self._release_locks()
            raise
        await self._grpc_server.start()
        for name in SERVICE_NAMES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._ticking = asyncio.create_task(self._tick())
        self._log.info("controller_started", addresses=self.addresses, process_id=os.getpid())

    async def drain(self) -> None:
        """Turns health to NOT_SERVING, ends every session and watch, and takes no new ones."""
        self._log.info("controller_draining")
        self._serving.start_draining()
        await self._health.enter_graceful_shutdown()
        reason = Draining("the controller is shutting down")
        self._sessions.end_all(reason)
        self.watchers.end_all(reason)

    async def stop(self) -> None:
        """Drains, lets calls in flight finish, and stops serving."""
        await self.drain()
        await self._grpc_server.stop(SHUTDOWN_GRACE_S)
        if self._ticking is not None:
            self._ticking.cancel()
        self._release_locks()
        self._log.info("controller_stopped")

    def expire_leases(self) -> None:
        """Ends the epochs whose lease ran out by the server's clock."""
        self._epochs.expire_leases(now_ms=self._clock())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LEASE_TICK_S)
            try:
                self.expire_leases()
            except Exception as error:
                # Leases must go on running out whatever happened to one of them.
                self._log.error("lease_tick_failed", exc_info=error)

    def _bind(self, one: Address, credentials: grpc.ServerCredentials | None) -> str:
        if isinstance(one, UnixAddress):
            lock = SocketLock(one.path)
            lock.acquire()
            self._locks.append(lock)
        try:
            if credentials is None:
                port = self._grpc_server.add_insecure_port(one.target)
            else:
                port = self._grpc_server.add_secure_port(one.target, credentials)
        except RuntimeError as error:
            raise AddressUnavailable(
                f"cannot listen on {one.target}: {bind_obstacle(one)}"
            ) from error
        return TcpAddress(one.host, port).target if isinstance(one, TcpAddress) else one.target

    def _release_locks(self) -> None:
        while self._locks:
            self._locks.pop().release()


def build(config: Config, *, log: FilteringBoundLogger, clock: Clock = monotonic_ms) -> Server:
    """Wires a controller. Raises ConfigInvalid."""
    config.check()
    hasher = _hasher(config, log)
    registry = PoolRegistry(
        hasher,
        epoch_first=time.time_ns() // 1_000_000,
        event_bytes_kept_max=config.event_bytes_kept_max,
        eviction_policy=config.eviction_policy,
    )
    sessions = OpenSessions()
    watchers = Watchers()
    epochs = Epochs(registry, sessions, watchers, log)
    hashing = SlicedHashing(epochs)
    steps = StepRunner(epochs, hashing)
    serving = Serving()
    health = HealthServicer()
    grpc_server = grpc.aio.server(interceptors=[ErrorInterceptor(log)], options=SERVER_OPTIONS)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(
        CacheService(registry, sessions, steps, serving, clock=clock, log=log), grpc_server
    )
    pool_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(
            registry,
            epochs,
            serving,
            hash_algorithm=config.hash_algorithm,
            new_session_token=lambda: secrets.token_bytes(SESSION_TOKEN_BYTES),
            clock=clock,
            log=log,
        ),
        grpc_server,
    )
    inspect_pb2_grpc.add_InspectServiceServicer_to_server(
        InspectService(registry, watchers, version=_version(), start_time=_now(), clock=clock),
        grpc_server,
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(
        AdminService(registry, epochs, log), grpc_server
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, grpc_server)
    reflection.enable_server_reflection(
        (
            *SERVICE_NAMES,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ),
        grpc_server,
    )
    return Server(
        grpc_server,
        config=config,
        registry=registry,
        hashing=hashing,
        epochs=epochs,
        sessions=sessions,
        watchers=watchers,
        serving=serving,
        health=health,
        clock=clock,
        log=log,
    )


async def serve(server: Server, *, on_started: Callable[[Sequence[str]], None]) -> None:
    """Runs a server until SIGTERM or SIGINT, then stops it within SHUTDOWN_GRACE_S."""
    loop = asyncio.get_running_loop()
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    await server.start()
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    on_started(server.addresses)
    await told_to_end.wait()
    await server.stop()


def _hasher(config: Config, log: FilteringBoundLogger) -> Hasher:
    if config.hash_algorithm not in HASHES:
        raise ConfigInvalid(
            f"hash algorithm {config.hash_algorithm!r} is not one of {', '.join(HASHES)}"
        )
    seed = choose_seed(
        config.hash_algorithm,
        option=config.hash_seed,
        environment=os.environ.get("PYTHONHASHSEED"),
        random_bytes=secrets.token_bytes(SEED_BYTES),
    )
    if seed.is_random:
        log.warning("hash_seed_random", hash_algorithm=config.hash_algorithm)
    return Hasher(config.hash_algorithm, seed=seed.text)


def _version() -> str:
    try:
        return metadata.version("prefixd")
    except metadata.PackageNotFoundError:
        return "unknown"


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now


def _credentials(tls: TlsConfig | None) -> grpc.ServerCredentials | None:
    if tls is None:
        return None
    try:
        # gRPC says nothing about bad files; Python's own TLS does.
        checked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        checked.load_cert_chain(tls.certificate, tls.private_key)
        if tls.client_ca is not None:
            checked.load_verify_locations(tls.client_ca)
        return grpc.ssl_server_credentials(
            [(tls.private_key.read_bytes(), tls.certificate.read_bytes())],
            root_certificates=tls.client_ca.read_bytes() if tls.client_ca else None,
            require_client_auth=tls.client_ca is not None,
        )
    except OSError as error:
        raise ConfigInvalid(f"the TLS files cannot be used: {error}") from error
