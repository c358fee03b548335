"""AdminService: what operators may change."""

from collections.abc import Sequence
from typing import Any

from structlog.typing import FilteringBoundLogger

from prefixd.controller.core.audit import INVARIANTS, audit
from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.pool import Pool
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

    async def EvictBlocks(
        self, request: admin_pb2.EvictBlocksRequest, context: Any
    ) -> admin_pb2.EvictBlocksResponse:
        """Takes blocks out of the cache, with everything behind them."""
        pool = self._registry.pool(request.pool_name)
        digests = _digests(pool, request.hashes_hex)
        if not digests and not request.block_ids:
            raise FieldInvalid("block_ids or hashes_hex must name a block", field="block_ids")
        with self._epochs.ended_by_failure(pool):
            dropped = pool.evict_blocks(block_ids=set(request.block_ids), digests=digests)
        self._log.info(
            "blocks_evicted",
            pool_name=request.pool_name,
            dropped_block_count=dropped.block_count,
            held_block_count=dropped.held_block_count,
        )
        return admin_pb2.EvictBlocksResponse(
            dropped_block_count=dropped.block_count,
            held_block_count=dropped.held_block_count,
            revision=pool.revision,
        )

    async def VerifyPool(
        self, request: admin_pb2.VerifyPoolRequest, context: Any
    ) -> admin_pb2.VerifyPoolResponse:
        """Checks every invariant of a pool."""
        pool = self._registry.pool(request.pool_name)
        with self._epochs.ended_by_failure(pool):
            found = audit(pool)
        self._log.info("pool_verified", pool_name=request.pool_name, epoch=pool.epoch)
        return admin_pb2.VerifyPoolResponse(
            epoch=pool.epoch,
            revision=pool.revision,
            invariants=INVARIANTS,
            block_count=found.block_count,
            cached_block_count=found.cached_block_count,
            digest_count=found.digest_count,
            sequence_count=found.sequence_count,
        )


def _digests(pool: Pool, hashes_hex: Sequence[str]) -> frozenset[bytes]:
    """Converts digests. Raises FieldInvalid where one is not of the pool's size."""
    size = pool.digests.digest_size
    digests = set()
    for index, text in enumerate(hashes_hex):
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            digest = b""
        if len(digest) != size:
            raise FieldInvalid(
                f"hashes_hex[{index}] must be a digest of {size} bytes in hexadecimal",
                field=f"hashes_hex[{index}]",
                numbers={"index": index, "digest_size": size},
            )
        digests.add(digest)
    return frozenset(digests)
