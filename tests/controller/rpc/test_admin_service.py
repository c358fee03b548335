"""EvictBlocks and VerifyPool through a real server; FlushPool is tested beside the pool's life."""

import grpc
import pytest

from prefixd.v1 import admin_pb2, events_pb2, inspect_pb2
from tests.support.driver import (
    CALL_TIMEOUT_S,
    Driver,
    call_error,
    close_entry,
    open_entry,
    refused,
)

PROMPT = list(range(100, 113))


def evict(calls, **fields) -> admin_pb2.EvictBlocksResponse:
    """Evicts from the pool."""
    return calls.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(**({"pool_name": "pool"} | fields)))


def verify(calls, pool_name: str = "pool") -> admin_pb2.VerifyPoolResponse:
    """Verifies a pool."""
    return calls.admin.VerifyPool(admin_pb2.VerifyPoolRequest(pool_name=pool_name))


def published(calls) -> dict[int, str]:
    """The digests of the published blocks by block id."""
    page = calls.inspect.ListBlocks(
        inspect_pb2.ListBlocksRequest(pool_name="pool", page_size=1_000)
    )
    return {block.block_id: block.hash_hex for block in page.blocks if block.hash_hex}


def test_blocks_are_evicted_by_id_and_by_digest(calls):
    """What is behind them goes too; a second call finds nothing left to do."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    digests = published(calls)
    response = evict(calls, block_ids=[3])
    assert (response.dropped_block_count, response.held_block_count) == (1, 1)
    assert response.revision == 2
    response = evict(calls, hashes_hex=[digests[2]])
    assert response.dropped_block_count == 1
    assert published(calls) == {1: digests[1]}
    assert evict(calls, block_ids=[2, 3], hashes_hex=[digests[3]]).dropped_block_count == 0
    driver.step(close_entry(1))


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"pool_name": "nowhere", "block_ids": [1]}, "NOT_FOUND", "POOL_NOT_FOUND"),
        ({"block_ids": [1, 64]}, "NOT_FOUND", "BLOCK_NOT_FOUND"),
        ({"block_ids": [0]}, "NOT_FOUND", "BLOCK_NOT_FOUND"),
        ({}, "INVALID_ARGUMENT", "FIELD_INVALID"),
        ({"hashes_hex": ["00"]}, "INVALID_ARGUMENT", "FIELD_INVALID"),
        ({"block_ids": [1], "hashes_hex": ["xy" * 32]}, "INVALID_ARGUMENT", "FIELD_INVALID"),
    ],
)
def test_bad_eviction_is_refused_and_changes_nothing(calls, fields, code, reason):
    """Also where one of the named blocks could have been evicted."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    before = published(calls)
    error = refused(lambda: evict(calls, **fields))
    assert (error.code.name, error.reason) == (code, reason)
    assert published(calls) == before


def test_verify_says_what_was_checked(calls):
    """Every block, digest and sequence counts."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT), open_entry(2, [7] * 9))
    response = verify(calls)
    assert response.epoch == driver.registered.epoch
    assert (response.block_count, response.sequence_count) == (63, 2)
    assert (response.cached_block_count, response.digest_count) == (5, 5)
    assert len(response.invariants) > 5


def test_broken_invariant_ends_that_pools_epoch_only(calls, controller):
    """The audit says what broke; other pools go on, and the watchers learn why theirs ended."""
    driver, other = Driver(calls), Driver(calls, "other")
    driver.step(open_entry(1, PROMPT))
    watch = calls.inspect.WatchEvents(
        events_pb2.WatchEventsRequest(pool_name="pool"), timeout=CALL_TIMEOUT_S
    )
    next(watch)
    pool = controller.server.registry.pool("pool")

    def miscount() -> None:
        pool.state.order.plain_count += 1

    controller.call(miscount)
    error = refused(lambda: verify(calls))
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INVARIANT_BROKEN")
    assert "count of free blocks" in error.message
    with pytest.raises(grpc.RpcError) as raised:
        next(watch)
    assert call_error(raised.value).reason == "INVARIANT_BROKEN"
    assert refused(driver.step).reason == "EPOCH_STALE"
    other.step(open_entry(1, PROMPT))
    assert verify(calls, "other").sequence_count == 1


def test_verify_of_an_unknown_pool_is_not_found(calls):
    """There is nothing to verify."""
    assert refused(lambda: verify(calls, "nowhere")).reason == "POOL_NOT_FOUND"
