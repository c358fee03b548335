"""InspectService: what operators, routers and tools may read."""

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from prefixd.controller.clock import Clock
from prefixd.controller.core import inspect, limits
from prefixd.controller.core.errors import EpochStale, PageTokenInvalid
from prefixd.controller.core.hashing import HASHES
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.convert_inspect import (
    block_message,
    block_state,
    pool_message,
    sequence_message,
)
from prefixd.controller.rpc.paging import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX, Listing
from prefixd.controller.rpc.watchers import HEARTBEAT_S, WATCHERS_MAX, Watchers
from prefixd.v1 import events_pb2, inspect_pb2, inspect_pb2_grpc

HOLDERS_MAX = 1_000
"""Sequences that GetBlock names."""
BLOCK_ID_DIGITS_MAX = len(str(limits.BLOCK_COUNT_MAX))
"""Digits of the largest block id."""
LIMITS = {
    "steps_in_flight_max": limits.STEPS_IN_FLIGHT_MAX,
    "block_size_max": limits.BLOCK_SIZE_MAX,
    "block_count_max": limits.BLOCK_COUNT_MAX,
    "slot_count_max": limits.SLOT_COUNT_MAX,
    "tokens_per_sequence_max": limits.TOKENS_PER_SEQUENCE_MAX,
    "sequences_per_pool_max": limits.SEQUENCES_PER_POOL_MAX,
    "pools_max": limits.POOLS_MAX,
    "groups_per_pool_max": limits.GROUPS_PER_POOL_MAX,
    "decode_rows_max": limits.DECODE_ROWS_MAX,
    "sequence_id_bytes_max": limits.SEQUENCE_ID_BYTES_MAX,
    "cache_salt_length_max": limits.CACHE_SALT_LENGTH_MAX,
    "identifier_length_max": limits.IDENTIFIER_LENGTH_MAX,
    "lora_path_length_max": limits.LORA_PATH_LENGTH_MAX,
    "pool_name_length_max": limits.POOL_NAME_LENGTH_MAX,
    "pool_text_length_max": limits.POOL_TEXT_LENGTH_MAX,
    "multimodal_items_max": limits.MULTIMODAL_ITEMS_MAX,
    "lease_ms_default": limits.LEASE_MS_DEFAULT,
    "lease_ms_min": limits.LEASE_MS_MIN,
    "lease_ms_max": limits.LEASE_MS_MAX,
    "retention_priority_max": limits.RETENTION_PRIORITY_MAX,
    "retention_ms_max": limits.RETENTION_MS_MAX,
    "message_bytes_max": limits.MESSAGE_BYTES_MAX,
    "page_size_default": PAGE_SIZE_DEFAULT,
    "page_size_max": PAGE_SIZE_MAX,
    "holders_max": HOLDERS_MAX,
    "watchers_max": WATCHERS_MAX,
    "event_blocks_max": limits.EVENT_BLOCKS_MAX,
    "event_tokens_max": limits.EVENT_TOKENS_MAX,
}
"""Every documented limit by name."""


class InspectService(inspect_pb2_grpc.InspectServiceServicer):
    """Serves readers; nothing here changes anything."""

    def __init__(
        self,
        registry: PoolRegistry,
        watchers: Watchers,
        *,
        version: str,
        start_time: Timestamp,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._watchers = watchers
        self._version = version
        self._start_time = start_time
        self._clock = clock

    async def GetServerInfo(
        self, request: inspect_pb2.GetServerInfoRequest, context: Any
    ) -> inspect_pb2.GetServerInfoResponse:
        """Describes the controller."""
        hasher = self._registry.hasher
        return inspect_pb2.GetServerInfoResponse(
            version=self._version,
            hash_algorithm=hasher.algorithm.name,
            root_hash_hex=hasher.root.hex(),
            start_time=self._start_time,
            pool_count=len(self._registry.pools()),
            limits=LIMITS | {"event_bytes_kept_max": self._registry.event_bytes_kept_max},
            hash_algorithms=tuple(HASHES),
            eviction_policy=self._registry.eviction_policy,
            eviction_policies=tuple(EVICTION_POLICIES),
        )

    async def ListPools(
        self, request: inspect_pb2.ListPoolsRequest, context: Any
    ) -> inspect_pb2.ListPoolsResponse:
        """Lists the pools by name."""
        listing = Listing("pools")
        row_count_max = listing.row_count_max(request.page_size)
        after = listing.last_key(request.page_token) or ""
        pools = [pool for pool in self._registry.pools() if pool.spec.pool_name > after]
        page = pools[:row_count_max]
        return inspect_pb2.ListPoolsResponse(
            pools=[self._pool_message(pool) for pool in page],
            next_page_token=listing.token(page[-1].spec.pool_name)
            if len(pools) > row_count_max
            else "",
        )

    async def GetPool(
        self, request: inspect_pb2.GetPoolRequest, context: Any
    ) -> inspect_pb2.GetPoolResponse:
        """Shows one pool."""
        pool = self._registry.pool(request.pool_name)
        return inspect_pb2.GetPoolResponse(pool=self._pool_message(pool))

    async def ListSequences(
        self, request: inspect_pb2.ListSequencesRequest, context: Any
    ) -> inspect_pb2.ListSequencesResponse:
        """Lists a pool's open sequences by id."""
        pool = self._registry.pool(request.pool_name)
        listing = Listing("sequences", pool.spec.pool_name, pool.epoch)
        row_count_max = listing.row_count_max(request.page_size)
        after = listing.last_key(request.page_token) or ""
        # One row more than asked for tells whether there is a next page.
        views = inspect.sequences(pool, after=after, count=row_count_max + 1)
        page = views[:row_count_max]
        return inspect_pb2.ListSequencesResponse(
            sequences=[sequence_message(view) for view in page],
            next_page_token=listing.token(page[-1].sequence_id)
            if len(views) > row_count_max
            else "",
            revision=pool.revision,
        )

    async def GetSequence(
        self, request: inspect_pb2.GetSequenceRequest, context: Any
    ) -> inspect_pb2.GetSequenceResponse:
        """Shows one sequence with its block tables."""
        pool = self._registry.pool(request.pool_name)
        view = inspect.sequence(pool, request.sequence_id)
        tables = inspect.block_tables(pool, request.sequence_id)
        return inspect_pb2.GetSequenceResponse(
            sequence=sequence_message(view),
            tables=[inspect_pb2.BlockTable(block_ids=table.tolist()) for table in tables],
            revision=pool.revision,
        )

    async def ListBlocks(
        self, request: inspect_pb2.ListBlocksRequest, context: Any
    ) -> inspect_pb2.ListBlocksResponse:
        """Lists a pool's blocks by id."""
        pool = self._registry.pool(request.pool_name)
        state = block_state(request.state)
        listing = Listing("blocks", pool.spec.pool_name, pool.epoch, request.state)
        row_count_max = listing.row_count_max(request.page_size)
        after = _block_key(listing.last_key(request.page_token))
        views = inspect.blocks(pool, after=after, count=row_count_max + 1, state=state)
        page = views[:row_count_max]
        return inspect_pb2.ListBlocksResponse(
            blocks=[block_message(view) for view in page],
            next_page_token=listing.token(str(page[-1].block_id))
            if len(views) > row_count_max
            else "",
            revision=pool.revision,
            epoch=pool.epoch,
        )

    async def GetBlock(
        self, request: inspect_pb2.GetBlockRequest, context: Any
    ) -> inspect_pb2.GetBlockResponse:
        """Shows one block and who holds it."""
        pool = self._registry.pool(request.pool_name)
        view = inspect.block(pool, request.block_id)
        return inspect_pb2.GetBlockResponse(
            block=block_message(view),
            sequence_ids=inspect.holders(pool, request.block_id, count=HOLDERS_MAX),
            revision=pool.revision,
        )

    async def ListFreeBlocks(
        self, request: inspect_pb2.ListFreeBlocksRequest, context: Any
    ) -> inspect_pb2.ListFreeBlocksResponse:
        """Shows the whole free order at one revision."""
        pool = self._registry.pool(request.pool_name)
        return inspect_pb2.ListFreeBlocksResponse(
            block_ids=inspect.free_order(pool).tolist(), revision=pool.revision
        )

    async def WatchEvents(
        self, request: events_pb2.WatchEventsRequest, context: Any
    ) -> AsyncIterator[events_pb2.WatchEventsResponse]:
        """Sends a pool's events as they come."""
        pool = self._registry.pool(request.pool_name)
        if request.epoch not in (0, pool.epoch):
            raise EpochStale(
                f"epoch {request.epoch} of pool {request.pool_name!r} is not the live one",
                numbers={"epoch": request.epoch, "live_epoch": pool.epoch},
            )
        is_resumed = request.HasField("after_revision")
        with self._watchers.watching(pool) as watch:
            async for response in watch.follow(
                request.after_revision if is_resumed else pool.revision,
                with_token_ids=request.with_token_ids,
                heartbeat_s=HEARTBEAT_S,
            ):
                yield response

    def _pool_message(self, pool: Pool) -> inspect_pb2.Pool:
        lease = self._registry.lease(pool.spec.pool_name, now_ms=self._clock())
        return pool_message(pool, inspect.pool_view(pool), lease)


def _block_key(last_key: str | None) -> int:
    if last_key is None:
        return 0
    is_number = last_key.isascii() and last_key.isdigit()
    if not is_number or len(last_key) > BLOCK_ID_DIGITS_MAX:
        raise PageTokenInvalid("page_token was not made by this listing", field="page_token")
    return int(last_key)
