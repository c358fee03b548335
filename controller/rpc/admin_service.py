"""AdminService: what operators may change."""

from typing import Any

from structlog.typing import FilteringBoundLogger

from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.epochs import Epochs
from prefixd.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Serves operators; every call takes effect between two steps."""

    def __init__(self, registry: PoolRegistry, epochs: Epochs, log: FilteringBoundLogger) -> None:
        self._registry = registry
        self._epochs = epochs
        self._log = log

    async def FlushPool(
        self, request: admin_pb2.FlushPoolRequest, context: Any
    ) -> admin_pb2.FlushPoolResponse:
        """Drops all cached content of a pool."""
        pool = self._registry.pool(request.pool_name)
        with self._epochs.ended_by_failure(pool):
            dropped_block_count = pool.flush()
        self._log.info(
            "pool_flushed",
            pool_name=request.pool_name,
            dropped_block_count=dropped_block_count,
        )
        return admin_pb2.FlushPoolResponse(dropped_block_count=dropped_block_count)
