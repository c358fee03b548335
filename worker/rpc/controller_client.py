"""The worker's side of its pool at the controller: registration, session, reconnecting."""

import asyncio
from dataclasses import dataclass
from typing import cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from prefixd.v1 import cache_pb2, cache_pb2_grpc, pool_pb2, pool_pb2_grpc, types_pb2
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.logs import Log
from prefixd.worker.rpc.controller_channel import open_channel
from prefixd.worker.rpc.step_messages import reason_name
from prefixd.worker.rpc.tls import ControllerTls

RECONNECT_DELAY_S_MIN = 0.1
RECONNECT_DELAY_S_MAX = 2.0
CALL_TIMEOUT_S = 5.0
"""Deadline of registering."""
RELEASE_TIMEOUT_S = 1.0
"""Deadline of giving the pool back: the process is about to end."""
EPOCH_ENDING_REASONS = frozenset(
    {"EPOCH_STALE", "POOL_NOT_FOUND", "NOT_POOL_DRIVER", "INVARIANT_BROKEN"}
)
"""Reasons after which only a new registration helps."""

POOL_REFUSING_REASONS = frozenset({"FIELD_INVALID", "UNSUPPORTED"})
"""Reasons for which no later registration of the same pool would be taken either."""

Session = grpc.aio.StreamStreamCall[cache_pb2.SessionRequest, cache_pb2.SessionResponse]


class EpochEnded(Exception):
    """The epoch is over: all that the controller knew of our sequences is gone."""


class ControllerSilent(Exception):
    """A call did not reach the controller, or its answer did not reach us; it may be repeated."""


class PoolRefused(Exception):
    """The controller will not take the pool as it is described; trying again is no use."""


class StepRefused(Exception):
    """The controller refused a whole step; its id is not used."""

    def __init__(self, *, reason: str, message: str, field: str) -> None:
        # This text is logged, and that of a bad token id would name the token.
        super().__init__(f"{reason}: {field if reason == 'TOKEN_ID_INVALID' else message}")
        self.reason = reason
        self.field = field


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What a pool is registered with; ``lease_ms`` None leaves the lease to the controller."""

    pool_name: str
    model_name: str
    block_count: int
    block_size: int
    groups: tuple[KvGroup, ...]
    kv_format: str
    vocabulary_size: int
    model_version: str = ""
    sub_block_reuse: bool = False
    merge_duplicates: bool = False
    eviction_policy: str = ""
    lease_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """One incarnation of the pool."""

    epoch: int
    session_token: bytes


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A step whose reply is missing."""

    request: cache_pb2.StepRequest
    reply: asyncio.Future[cache_pb2.StepResponse]


class ControllerClient:
    """Keeps the pool registered and its session open, for as long as it runs.

    A broken session is opened again within the lease, and the step whose reply is missing is sent
    again: the controller answers it from its kept replies. If the epoch is over the pool is
    registered anew.

    Invariants: at most one step is outstanding; a step is answered once, or fails with
    `EpochEnded` or `StepRefused`.
    """

    def __init__(
        self,
        address: str,
        description: PoolDescription,
        log: Log,
        *,
        tls: ControllerTls | None = None,
    ) -> None:
        """Makes a client that `run` brings to life. Raises TlsUnusable."""
        self._description = description
        self._log = log.bind(controller=address, pool_name=description.pool_name)
        self._channel = open_channel(address, tls)
        self._pools = pool_pb2_grpc.PoolServiceStub(self._channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._registration: Registration | None = None
        self._session: Session | None = None
        self._is_ready = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._is_lost.set()
        self._outstanding: _Outstanding | None = None
        self._reconnect_delay_s = RECONNECT_DELAY_S_MIN
        self._model_version = description.model_version
        self._stated_model_version = description.model_version

    @property
    def stated_model_version(self) -> str:
        """The version of the weights that the controller was told last."""
        return self._stated_model_version

    @property
    def registration(self) -> Registration | None:
        """The current incarnation, if there is one."""
        return self._registration

    @property
    def is_ready(self) -> bool:
        """Whether a session is open."""
        return self._is_ready.is_set()

    async def ready(self) -> Registration:
        """Waits until a session is open."""
        while True:
            await self._is_ready.wait()
            # It may have been lost again before this task had its turn.
            if self._registration is not None and self._session is not None:
                return self._registration
            await asyncio.sleep(0)

    async def lost(self) -> None:
        """Waits until no session is open."""
        await self._is_lost.wait()

    async def run(self, worker_address: str) -> None:
        """Registers, holds the session and reconnects, until cancelled.

        Raises:
            PoolRefused: this controller will never take the pool.
        """
        while True:
            try:
                if self._registration is None:
                    self._registration = await self._register(worker_address)
                await self._hold_session(self._registration)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                self._note_failure(error)
            except asyncio.CancelledError:
                # gRPC raises this also where it was the session that we cancelled.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            await asyncio.sleep(self._reconnect_delay_s)
            self._reconnect_delay_s = min(2 * self._reconnect_delay_s, RECONNECT_DELAY_S_MAX)

    async def step(
        self, request: cache_pb2.StepRequest, registration: Registration
    ) -> cache_pb2.StepResponse:
        """Sends a step of that incarnation and waits for its reply, across reconnects.

        Raises:
            EpochEnded: the incarnation is over.
            StepRefused: the controller refused the step as a whole.
        """
        assert self._outstanding is None, "one step at a time"
        if registration != self._registration:
            raise EpochEnded
        outstanding = _Outstanding(request, asyncio.get_running_loop().create_future())
        self._outstanding = outstanding
        try:
            if self._session is not None:
                await self._send(self._session, outstanding)
            return await outstanding.reply
        finally:
            self._outstanding = None

    async def state_model_version(self, model_version: str, registration: Registration) -> int:
        """Tells the controller of other weights; returns how many blocks it dropped.

        Every later registration names that version, too.

        Raises:
            EpochEnded: the incarnation is over.
            ControllerSilent: the controller could not be told now.
        """
        self._model_version = model_version
        if registration != self._registration:
            raise EpochEnded
        request = pool_pb2.SetModelVersionRequest(
            pool_name=self._description.pool_name,
            epoch=registration.epoch,
            session_token=registration.session_token,
            model_version=model_version,
        )
        try:
            response = await self._pools.SetModelVersion(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = call_error_reason(error)
            self._log.warning("model_version_not_stated", reason=reason)
            if reason not in EPOCH_ENDING_REASONS:
                raise ControllerSilent from error
            self._end_epoch()
            raise EpochEnded from error
        self._stated_model_version = model_version
        return response.dropped_block_count

    async def end_epoch(self) -> None:
        """Gives the incarnation up, for what the controller and we know of it has come apart."""
        await self.release()
        self._end_epoch()

    async def release(self) -> None:
        """Gives the pool back, if the controller can be reached."""
        if self._registration is None:
            return
        request = pool_pb2.ReleasePoolRequest(
            pool_name=self._description.pool_name,
            epoch=self._registration.epoch,
            session_token=self._registration.session_token,
        )
        try:
            await self._pools.ReleasePool(request, timeout=RELEASE_TIMEOUT_S)
            self._log.info("pool_released", epoch=self._registration.epoch)
        except grpc.aio.AioRpcError as error:
            self._log.warning("pool_not_released", reason=call_error_reason(error))

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)

    async def _register(self, worker_address: str) -> Registration:
        description, model_version = self._description, self._model_version
        request = pool_pb2.RegisterPoolRequest(
            pool_name=description.pool_name,
            model_name=description.model_name,
            model_version=model_version,
            block_count=description.block_count,
            block_size=description.block_size,
            groups=[_group_message(group) for group in description.groups],
            kv_format=description.kv_format,
            vocabulary_size=description.vocabulary_size,
            worker_address=worker_address,
            sub_block_reuse=description.sub_block_reuse,
            merge_duplicates=description.merge_duplicates,
            eviction_policy=description.eviction_policy,
        )
        if description.lease_ms is not None:
            request.lease.FromMilliseconds(description.lease_ms)
        try:
            response = await self._pools.RegisterPool(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = call_error_reason(error)
            if reason in POOL_REFUSING_REASONS:
                message = f"the controller refuses the pool: {error.details()} ({reason})"
                raise PoolRefused(message) from error
            raise
        self._stated_model_version = model_version
        self._log.info(
            "pool_registered", epoch=response.epoch, lease_ms=response.lease.ToMilliseconds()
        )
        return Registration(response.epoch, response.session_token)

    async def _hold_session(self, registration: Registration) -> None:
        """Opens a session and serves it to its end."""
        session: Session = self._cache.Session(None)
        start = cache_pb2.SessionStart(
            pool_name=self._description.pool_name,
            epoch=registration.epoch,
            session_token=registration.session_token,
        )
        try:
            await session.write(cache_pb2.SessionRequest(start=start))
            if not isinstance(await session.read(), cache_pb2.SessionResponse):
                return
            self._session = session
            self._reconnect_delay_s = RECONNECT_DELAY_S_MIN
            self._log.info("session_opened", epoch=registration.epoch)
            self._is_ready.set()
            self._is_lost.clear()
            if self._outstanding is not None:
                await self._send(session, self._outstanding)
            while isinstance(message := await session.read(), cache_pb2.SessionResponse):
                self._receive(message)
        finally:
            session.cancel()
            self._lose_session()

    def _note_failure(self, error: Exception) -> None:
        reason = call_error_reason(error)
        event = "controller_unreachable" if reason == "UNAVAILABLE" else "controller_refused"
        if reason in EPOCH_ENDING_REASONS:
            # The controller is there, and takes the pool at once.
            self._reconnect_delay_s = RECONNECT_DELAY_S_MIN
        self._log.warning(event, reason=reason, retry_s=self._reconnect_delay_s)
        if reason in EPOCH_ENDING_REASONS:
            self._end_epoch()

    def _lose_session(self) -> None:
        self._session = None
        self._is_ready.clear()
        self._is_lost.set()

    async def _send(self, session: Session, outstanding: _Outstanding) -> None:
        try:
            await session.write(cache_pb2.SessionRequest(step=outstanding.request))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._log.debug("session_broken")  # `run` opens another and sends the step again

    def _receive(self, message: cache_pb2.SessionResponse) -> None:
        outstanding = self._outstanding
        match message.WhichOneof("message"):
            case "step" if _answers(outstanding, message.step.step_id):
                assert outstanding is not None
                outstanding.reply.set_result(message.step)
            case "error" if _answers(outstanding, message.error.step_id):
                assert outstanding is not None
                self._refuse(outstanding, message.error)
            case "goodbye":
                reason = reason_name(message.goodbye.reason)
                self._log.info("session_ends", reason=reason)
                if reason in EPOCH_ENDING_REASONS:
                    self._end_epoch()
            case kind:
                # A second reply to a step that was sent twice: its plan has been executed.
                self._log.debug("message_ignored", kind=kind)

    def _refuse(self, outstanding: _Outstanding, error: cache_pb2.StepError) -> None:
        reason = reason_name(error.reason)
        if reason in EPOCH_ENDING_REASONS:
            self._end_epoch()
        else:
            refused = StepRefused(reason=reason, message=error.message, field=error.field)
            outstanding.reply.set_exception(refused)

    def _end_epoch(self) -> None:
        if self._registration is None:
            return
        self._log.warning("epoch_ended", epoch=self._registration.epoch)
        self._registration = None
        if self._session is not None:
            self._session.cancel()
        self._lose_session()
        if self._outstanding is not None and not self._outstanding.reply.done():
            self._outstanding.reply.set_exception(EpochEnded())


def _group_message(group: KvGroup) -> types_pb2.KvGroup:
    message = types_pb2.KvGroup(
        kind=types_pb2.KV_GROUP_KIND_FULL_ATTENTION, layer_count=len(group.layer_indices)
    )
    if group.window_token_count is not None:
        message.kind = types_pb2.KV_GROUP_KIND_SLIDING_WINDOW
        message.window_token_count = group.window_token_count
    return message


def call_error_reason(error: Exception) -> str:
    """The ErrorInfo reason of a failed call, or the name of its status code."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return type(error).__name__
    status = rpc_status.from_call(cast(grpc.Call, error))
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return error.code().name


def _answers(outstanding: _Outstanding | None, step_id: int) -> bool:
    return (
        outstanding is not None
        and outstanding.request.step_id == step_id
        and not outstanding.reply.done()
    )
