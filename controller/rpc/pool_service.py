"""PoolService: registration, leases, versions, draining and release."""

from collections.abc import Callable
from typing import Any

from structlog.typing import FilteringBoundLogger

from prefixd.controller.clock import Clock
from prefixd.controller.core.errors import EpochStale
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX, TOKENS_PER_SEQUENCE_MAX
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.convert_pool import duration_message, pool_spec_value
from prefixd.controller.rpc.epochs import Epochs
from prefixd.controller.rpc.serving import Serving
from prefixd.v1 import pool_pb2, pool_pb2_grpc


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """Serves the drivers' side of pools beside their steps."""

    def __init__(
        self,
        registry: PoolRegistry,
        epochs: Epochs,
        serving: Serving,
        *,
        hash_algorithm: str,
        new_session_token: Callable[[], bytes],
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._registry = registry
        self._epochs = epochs
        self._serving = serving
        self._hash_algorithm = hash_algorithm
        self._new_session_token = new_session_token
        self._clock = clock
        self._log = log

    async def RegisterPool(
        self, request: pool_pb2.RegisterPoolRequest, context: Any
    ) -> pool_pb2.RegisterPoolResponse:
        """Begins an epoch of a pool."""
        self._serving.check_not_draining()
        spec = pool_spec_value(request)
        session_token = self._new_session_token()
        registered = self._registry.register(
            spec, session_token=session_token, now_ms=self._clock()
        )
        self._epochs.began(registered.pool)
        self._log.info(
            "pool_registered",
            pool_name=spec.pool_name,
            epoch=registered.epoch,
            model_name=spec.model_name,
            block_count=spec.block_count,
            block_size=spec.block_size,
            eviction_policy=registered.pool.spec.eviction_policy,
            lease_ms=registered.lease_ms,
        )
        return pool_pb2.RegisterPoolResponse(
            epoch=registered.epoch,
            session_token=session_token,
            lease=duration_message(registered.lease_ms),
            block_size=spec.block_size,
            hash_algorithm=self._hash_algorithm,
            steps_in_flight_max=STEPS_IN_FLIGHT_MAX,
            tokens_per_sequence_max=TOKENS_PER_SEQUENCE_MAX,
            eviction_policy=registered.pool.spec.eviction_policy,
        )

    async def RenewPool(
        self, request: pool_pb2.RenewPoolRequest, context: Any
    ) -> pool_pb2.RenewPoolResponse:
        """Renews the lease."""
        now_ms = self._clock()
        self._registry.drive(
            pool_name=request.pool_name,
            epoch=request.epoch,
            session_token=request.session_token,
            now_ms=now_ms,
        )
        lease = self._registry.lease(request.pool_name, now_ms=now_ms)
        return pool_pb2.RenewPoolResponse(lease=duration_message(lease.lease_ms))

    async def SetModelVersion(
        self, request: pool_pb2.SetModelVersionRequest, context: Any
    ) -> pool_pb2.SetModelVersionResponse:
        """States another version of the model's weights."""
        now_ms = self._clock()
        pool = self._registry.drive(
            pool_name=request.pool_name,
            epoch=request.epoch,
            session_token=request.session_token,
            now_ms=now_ms,
        )
        with self._epochs.ended_by_failure(pool):
            dropped_block_count = self._registry.set_model_version(
                request.model_version,
                pool_name=request.pool_name,
                epoch=request.epoch,
                session_token=request.session_token,
                now_ms=now_ms,
            )
        self._log.info(
            "model_version_set",
            pool_name=request.pool_name,
            model_version=request.model_version,
            dropped_block_count=dropped_block_count,
        )
        return pool_pb2.SetModelVersionResponse(dropped_block_count=dropped_block_count)

    async def DrainPool(
        self, request: pool_pb2.DrainPoolRequest, context: Any
    ) -> pool_pb2.DrainPoolResponse:
        """Refuses new sequences from now on."""
        sequence_count = self._registry.drain(
            pool_name=request.pool_name,
            epoch=request.epoch,
            session_token=request.session_token,
            now_ms=self._clock(),
        )
        self._log.info("pool_draining", pool_name=request.pool_name, sequence_count=sequence_count)
        return pool_pb2.DrainPoolResponse(sequence_count=sequence_count)

    async def ReleasePool(
        self, request: pool_pb2.ReleasePoolRequest, context: Any
    ) -> pool_pb2.ReleasePoolResponse:
        """Closes all sequences and ends the epoch."""
        try:
            closed_sequence_count = self._registry.release(
                pool_name=request.pool_name,
                epoch=request.epoch,
                session_token=request.session_token,
            )
        except EpochStale:
            # Released already; whatever lives under this name or epoch now is somebody else's.
            return pool_pb2.ReleasePoolResponse()
        self._epochs.released(request.pool_name, request.epoch)
        return pool_pb2.ReleasePoolResponse(closed_sequence_count=closed_sequence_count)
