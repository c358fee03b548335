"""CacheService: steps by stream or one by one, and prefix matches."""

from typing import Any

import numpy as np
from structlog.typing import FilteringBoundLogger

from prefixd.controller.clock import Clock
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.convert_identity import IDENTITY_NONE, identity_value
from prefixd.controller.rpc.serving import Serving
from prefixd.controller.rpc.session import SessionStream, read_start
from prefixd.controller.rpc.sessions import OpenSessions
from prefixd.controller.rpc.steps import StepRunner
from prefixd.v1 import cache_pb2, cache_pb2_grpc


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """Serves the drivers' steps and everyone's prefix matches."""

    def __init__(
        self,
        registry: PoolRegistry,
        sessions: OpenSessions,
        steps: StepRunner,
        serving: Serving,
        *,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._steps = steps
        self._serving = serving
        self._clock = clock
        self._log = log

    async def Session(  # type: ignore[override]  # it writes by itself
        self, request_iterator: Any, context: Any
    ) -> None:
        """Carries a pool's steps on one stream; its end starts the lease."""
        start = await read_start(context)
        self._serving.check_not_draining()
        pool = self._registry.begin_session(
            pool_name=start.pool_name,
            epoch=start.epoch,
            session_token=start.session_token,
            now_ms=self._clock(),
        )
        ending = self._sessions.add(pool.epoch)
        log = self._log.bind(pool_name=start.pool_name, epoch=start.epoch)
        log.info("session_started", applied_step_id=pool.applied_step_id)
        try:
            await SessionStream(
                pool, start, context, ending=ending, apply_step=self._apply_step
            ).run()
        finally:
            self._sessions.remove(pool.epoch)
            self._registry.end_session(pool, now_ms=self._clock())
            log.info("session_ended", applied_step_id=pool.applied_step_id)

    async def Step(self, request: cache_pb2.StepRequest, context: Any) -> cache_pb2.StepResponse:
        """Applies one step outside a session."""
        pool = self._registry.drive_unary(
            pool_name=request.pool_name,
            epoch=request.epoch,
            session_token=request.session_token,
            now_ms=self._clock(),
        )
        return self._apply_step(pool, request).step

    async def MatchPrefix(
        self, request: cache_pb2.MatchPrefixRequest, context: Any
    ) -> cache_pb2.MatchPrefixResponse:
        """Tells how many leading tokens are cached now."""
        pool = self._registry.pool(request.pool_name)
        match = pool.match_prefix(
            np.array(request.token_ids, dtype=np.uint32),
            identity_value(request.identity) if request.HasField("identity") else IDENTITY_NONE,
        )
        return cache_pb2.MatchPrefixResponse(
            published_token_count=match.published_token_count,
            pending_token_count=match.pending_token_count,
            epoch=pool.epoch,
        )

    def _apply_step(self, pool: Pool, request: cache_pb2.StepRequest) -> cache_pb2.SessionResponse:
        return self._steps.apply(pool, request, now_ms=self._clock())
