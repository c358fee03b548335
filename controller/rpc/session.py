"""One session stream, from ready to goodbye."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from prefixd.controller.core.errors import CacheError, FieldInvalid
from prefixd.controller.core.pool import Pool
from prefixd.controller.rpc.convert_reply import reason_value
from prefixd.controller.rpc.status import step_error
from prefixd.v1 import cache_pb2

Context = grpc.aio.ServicerContext[cache_pb2.SessionRequest, cache_pb2.SessionResponse]
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What a read returns once the client sends nothing more; absent from the stubs."""
ApplyStep = Callable[[Pool, cache_pb2.StepRequest], cache_pb2.SessionResponse]


async def read_start(context: Context) -> cache_pb2.SessionStart:
    """Reads the first message. Raises FieldInvalid unless it is a start."""
    request: Any = await context.read()
    if request is END_OF_STREAM or request.WhichOneof("message") != "start":
        raise FieldInvalid("the first message of a session must be a start", field="start")
    start: cache_pb2.SessionStart = request.start
    return start


class SessionStream:
    """Answers the steps of one session in order, until the client or the ending ends it.

    Invariants: one task reads and writes; it is never cancelled while it writes. A refused step is
    answered in band and the stream stays open.
    """

    def __init__(
        self,
        pool: Pool,
        start: cache_pb2.SessionStart,
        context: Context,
        *,
        ending: "asyncio.Future[CacheError]",
        apply_step: ApplyStep,
    ) -> None:
        self._pool = pool
        self._start = start
        self._context = context
        self._ending = ending
        self._apply_step = apply_step
        self._is_reading = False

    async def run(self) -> None:
        """Serves the stream. Raises the ending's reason, after a goodbye that names it."""
        await self._context.write(
            cache_pb2.SessionResponse(
                ready=cache_pb2.SessionReady(
                    applied_step_id=self._pool.applied_step_id,
                    executed_step_id=self._pool.executed_step_id,
                )
            )
        )
        pump = asyncio.create_task(self._pump())
        try:
            waited_for: set[asyncio.Future[Any]] = {pump, self._ending}
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done() and self._is_reading:
                pump.cancel()
            await asyncio.wait({pump})
        finally:
            pump.cancel()
        failure = None if pump.cancelled() else pump.exception()
        if self._ending.done():
            await self._say_goodbye(self._ending.result())
        if failure is not None:
            raise failure

    async def _say_goodbye(self, reason: CacheError) -> None:
        await self._context.write(
            cache_pb2.SessionResponse(
                goodbye=cache_pb2.SessionGoodbye(
                    reason=reason_value(reason.reason), message=reason.message
                )
            )
        )
        raise reason

    async def _pump(self) -> None:
        while not self._ending.done():
            self._is_reading = True
            request: Any = await self._context.read()
            self._is_reading = False
            if request is END_OF_STREAM:
                return
            await self._context.write(self._answer(request))

    def _answer(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        if request.WhichOneof("message") != "step":
            raise FieldInvalid("behind its start a session carries steps only", field="step")
        step = request.step
        try:
            self._check_address(step)
            return self._apply_step(self._pool, step)
        except CacheError as error:
            return cache_pb2.SessionResponse(error=step_error(error, step_id=step.step_id))

    def _check_address(self, step: cache_pb2.StepRequest) -> None:
        start = self._start
        if step.pool_name and step.pool_name != start.pool_name:
            raise FieldInvalid("pool_name differs from the session's", field="pool_name")
        if step.epoch and step.epoch != start.epoch:
            raise FieldInvalid(
                f"epoch {step.epoch} differs from the session's epoch {start.epoch}",
                field="epoch",
                numbers={"epoch": step.epoch, "session_epoch": start.epoch},
            )
        if step.session_token and step.session_token != start.session_token:
            raise FieldInvalid("session_token differs from the session's", field="session_token")
