"""WatchEvents: events by revision, resumable, bounded, and ended with a reason (S25)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from prefixd.controller.config import Config
from prefixd.controller.rpc.watchers import EVENTS_PER_RESPONSE_MAX, WATCHERS_MAX, Watch
from prefixd.v1 import admin_pb2, events_pb2, inspect_pb2, pool_pb2, types_pb2
from tests.support.controller import ANY_PORT, Stubs, controller_thread, stubs
from tests.support.driver import CALL_TIMEOUT_S, Driver, call_error, close_entry, open_entry

PROMPT = list(range(100, 113))
SLOW_CHANNEL = (
    # The receiver takes what it asks for and no more, so that an unread stream stands still.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1_024),
)


@contextmanager
def watching(calls: Stubs, **fields) -> Iterator[grpc.Call]:
    """Keeps a watch of the pool open for the length of the block."""
    request = events_pb2.WatchEventsRequest(**({"pool_name": "pool"} | fields))
    watch = calls.inspect.WatchEvents(request, timeout=CALL_TIMEOUT_S)
    try:
        yield watch
    finally:
        watch.cancel()


def read(watch, *, through_revision: int) -> list[events_pb2.PoolEvent]:
    """Reads until the watch has told everything up to a revision."""
    events: list[events_pb2.PoolEvent] = []
    while True:
        response = next(watch)
        events.extend(response.events)
        if response.through_revision >= through_revision:
            assert response.through_revision == through_revision
            return events


def revision(calls: Stubs) -> int:
    """The pool's revision now."""
    return calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool.revision


def ended(watch) -> grpc.RpcError:
    """Reads a watch to its end and returns its error."""
    with pytest.raises(grpc.RpcError) as raised:
        for _ in watch:
            pass
    return raised.value


def next_or_failure(watch):
    """Reads the next response, or the error that ends the watch."""
    try:
        return next(watch), None
    except grpc.RpcError as error:
        return None, error


def test_s25_stored_removed_and_cleared_come_in_order_without_a_gap(calls):
    """Each revision is one event; a run of blocks is one."""
    driver = Driver(calls)
    with watching(calls, after_revision=0, with_token_ids=True) as watch:
        assert next(watch).events == []
        driver.step(open_entry(1, PROMPT))
        driver.step(close_entry(1))
        driver.step()
        calls.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(pool_name="pool", block_ids=[2]))
        calls.admin.FlushPool(admin_pb2.FlushPoolRequest(pool_name="pool"))
        stored, removed, cleared = read(watch, through_revision=3)
    assert [event.revision for event in (stored, removed, cleared)] == [1, 2, 3]
    assert len(stored.stored.hashes_hex) == 3
    assert stored.stored.parent_hash_hex == ""
    assert list(stored.stored.token_ids) == PROMPT[:12]
    assert stored.stored.block_size == 4
    assert list(removed.removed.hashes_hex) == list(reversed(stored.stored.hashes_hex[1:]))
    assert cleared.WhichOneof("event") == "cleared"


def test_s25_pending_blocks_make_no_event(calls):
    """A block is announced once its step is confirmed, not when it is scheduled."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    assert revision(calls) == 0
    driver.step()
    assert revision(calls) == 1


def test_stored_event_names_the_identity(calls):
    """LoRA, salt, items, embeddings and version: whatever else the digests depend on."""
    driver = Driver(calls, model_version="7")
    identity = types_pb2.Identity(
        lora=types_pb2.LoraAdapter(name="l", path="/l", version="2"),
        cache_salt="tenant",
        multimodal_items=[types_pb2.MultimodalItem(identifier="cat", offset=3, token_count=2)],
        prompt_embeds_digests=[b"a" * 32],
    )
    driver.step(open_entry(1, PROMPT, identity=identity))
    driver.step()
    with watching(calls, after_revision=0) as watch:
        (event,) = read(watch, through_revision=1)
    stored = event.stored
    assert (stored.lora.name, stored.lora.path, stored.lora.version) == ("l", "/l", "2")
    assert (stored.cache_salt, stored.model_version) == ("tenant", "7")
    assert not stored.token_ids
    keys = stored.block_keys
    items = [(key.index, key.multimodal.identifier, key.multimodal.offset) for key in keys]
    assert items == [(0, "cat", 3), (0, "", 0), (1, "cat", -1)]
    assert stored.block_keys[1].prompt_embeds_digest == b"a" * 32


def test_watch_without_a_revision_begins_now(calls):
    """What was before is not told; the first response says where the watch begins."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    with watching(calls) as watch:
        first = next(watch)
        assert (list(first.events), first.through_revision) == ([], 1)
        assert first.epoch == driver.registered.epoch
        driver.step(close_entry(1), open_entry(2, list(range(9))))
        driver.step()
        assert [event.revision for event in read(watch, through_revision=2)] == [2]


def test_watch_resumes_from_any_revision(calls):
    """A watcher that was away goes on where it was."""
    driver = Driver(calls)
    for handle in range(1, 5):
        driver.step(open_entry(handle, [handle] * 5))
    driver.step()
    with watching(calls, after_revision=0) as watch:
        every = read(watch, through_revision=4)
    for after in range(4):
        with watching(calls, after_revision=after) as watch:
            assert read(watch, through_revision=4) == every[after:]


@pytest.mark.parametrize("window_count", [0, 1])
def test_s25_list_then_watch_has_no_gap(calls, window_count):
    """A listing read over several pages, while the pool changes, and the events behind its first
    page lead to the live set, in every KV group."""
    kinds = types_pb2.KvGroupKind
    groups = [types_pb2.KvGroup(kind=kinds.KV_GROUP_KIND_FULL_ATTENTION)] + [
        types_pb2.KvGroup(kind=kinds.KV_GROUP_KIND_SLIDING_WINDOW, window_token_count=5)
    ] * window_count
    driver = Driver(calls, block_count=24 * len(groups), groups=groups)
    for handle in range(1, 6):
        driver.step(open_entry(handle, [handle] * 9))
    driver.step()
    token, first, listed, closed = "", None, set(), 0
    while first is None or token:
        page = calls.inspect.ListBlocks(
            inspect_pb2.ListBlocksRequest(pool_name="pool", page_size=3, page_token=token)
        )
        first = first or page
        listed.update(published(page))
        token = page.next_page_token
        # Between two pages one prompt goes and another, which evicts its blocks, comes.
        closed += 1
        driver.step(close_entry(closed), open_entry(closed + 5, [closed + 5] * 9))
        driver.step()
    assert revision(calls) > first.revision + 8 * len(groups)
    with watching(calls, epoch=first.epoch, after_revision=first.revision) as watch:
        for event in read(watch, through_revision=revision(calls)):
            apply(event, listed)
    assert listed == live(calls)
    assert {group_index for group_index, _ in listed} == set(range(len(groups)))


def apply(event: events_pb2.PoolEvent, digests: set[tuple[int, str]]) -> None:
    """Applies an event as a set operation."""
    stored, removed = event.stored, event.removed
    match event.WhichOneof("event"):
        case "stored":
            digests.update((stored.group_index, hash_hex) for hash_hex in stored.hashes_hex)
        case "removed":
            digests.difference_update(
                (removed.group_index, hash_hex) for hash_hex in removed.hashes_hex
            )
        case "cleared":
            digests.clear()


def published(page: inspect_pb2.ListBlocksResponse) -> set[tuple[int, str]]:
    """The KV groups and digests of the published blocks of a listing."""
    return {(block.group_index, block.hash_hex) for block in page.blocks if block.hash_hex}


def live(calls: Stubs) -> set[tuple[int, str]]:
    """The KV groups and digests of the published blocks now."""
    return published(
        calls.inspect.ListBlocks(inspect_pb2.ListBlocksRequest(pool_name="pool", page_size=1_000))
    )


def test_events_compacted_says_what_is_kept():
    """A watcher that is too old is told so at once, and may resume from the oldest event kept."""
    config = Config(listen=ANY_PORT, event_bytes_kept_max=1_500)
    with controller_thread(config) as controller, stubs(controller.address) as calls:
        driver = Driver(calls)
        for handle in range(1, 11):
            driver.step(open_entry(handle, [handle] * 5))
        driver.step()
        with watching(calls, after_revision=0) as watch:
            error = call_error(ended(watch))
        assert error.code == grpc.StatusCode.OUT_OF_RANGE
        assert error.reason == "EVENTS_COMPACTED"
        oldest = int(error.metadata["oldest_revision"])
        assert oldest == 7
        with watching(calls, after_revision=oldest - 1) as watch:
            assert len(read(watch, through_revision=10)) == 4


def test_slow_watcher_is_told_that_events_are_gone():
    """Nothing is dropped silently: what was sent has no gap, and its end says why."""
    config = Config(listen=ANY_PORT, event_bytes_kept_max=200_000)
    with controller_thread(config) as controller:
        channel = grpc.insecure_channel(controller.address, options=SLOW_CHANNEL)
        with stubs(controller.address) as calls, channel:
            driver = Driver(calls, block_count=100, block_size=1_024)
            with watching(Stubs(channel), after_revision=0, with_token_ids=True) as watch:
                next(watch)
                for handle in range(1, 100):
                    driver.step(open_entry(handle, [handle] * 16_385))
                    driver.step(close_entry(handle))
                told, failure = 0, None
                while failure is None:
                    response, failure = next_or_failure(watch)
                    if response is not None:
                        revisions = [event.revision for event in response.events]
                        assert revisions == list(range(told + 1, response.through_revision + 1))
                        told = response.through_revision
            error = call_error(failure)
            assert error.reason == "EVENTS_COMPACTED"
            assert int(error.metadata["after_revision"]) == told
            assert int(error.metadata["oldest_revision"]) > told + 1


def test_revision_that_is_not_reached_is_refused(calls):
    """A revision of another epoch would otherwise be taken for one of this."""
    Driver(calls)
    for after in (-1, 1):
        with watching(calls, after_revision=after) as watch:
            error = call_error(ended(watch))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
        assert error.fields == ("after_revision",)


def test_watch_of_another_epoch_is_refused(calls):
    """Its revisions mean something else."""
    driver = Driver(calls)
    with watching(calls, epoch=driver.registered.epoch - 1) as watch:
        error = call_error(ended(watch))
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "EPOCH_STALE")


def test_watch_of_an_unknown_pool_is_not_found(calls):
    """There is nothing to watch."""
    with watching(calls, pool_name="nowhere") as watch:
        assert call_error(ended(watch)).reason == "POOL_NOT_FOUND"


def released(driver: Driver, controller) -> None:
    """The driver ends the epoch."""
    driver.stubs.pool.ReleasePool(pool_pb2.ReleasePoolRequest(**driver.key))


def expired(driver: Driver, controller) -> None:
    """The lease ends it."""
    controller.expire_leases(advance_ms=60_000)


def superseded(driver: Driver, controller) -> None:
    """A newcomer registers the name."""
    Driver(driver.stubs)


@pytest.mark.parametrize("end", [released, expired, superseded])
def test_watch_ends_with_its_epoch_and_has_told_everything(calls, controller, end):
    """However the epoch ends; the last events come before the error."""
    driver = Driver(calls)
    with watching(calls, after_revision=0) as watch:
        next(watch)
        driver.step(open_entry(1, PROMPT))
        driver.step()
        end(driver, controller)
        assert len(read(watch, through_revision=1)) == 1
        error = call_error(ended(watch))
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "EPOCH_STALE")


def test_watch_ends_when_the_controller_drains(calls, controller):
    """The watcher learns that the process ends, and connects again."""
    Driver(calls)
    with watching(calls) as watch:
        next(watch)
        controller.drain()
        assert call_error(ended(watch)).reason == "DRAINING"
    with watching(calls) as late:
        assert call_error(ended(late)).reason == "DRAINING"


def test_watchers_are_limited_and_leave_room_when_they_go(calls, controller):
    """The limit is documented; a cancelled watch counts no more."""
    Driver(calls)
    watches = [
        calls.inspect.WatchEvents(events_pb2.WatchEventsRequest(pool_name="pool"))
        for _ in range(WATCHERS_MAX)
    ]
    for watch in watches:
        next(watch)
    with watching(calls) as refused:
        error = call_error(ended(refused))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert error.metadata["watchers_max"] == str(WATCHERS_MAX)
    for watch in watches:
        watch.cancel()
    while controller.call(lambda: controller.server.watchers.count):
        pass
    with watching(calls) as again:
        next(again)


def test_silence_is_broken_by_empty_responses(calls, controller):
    """So that a watcher knows that it is still connected, and through which revision."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    pool = controller.server.registry.pool("pool")

    async def seen() -> list[tuple[int, int]]:
        batches = Watch(pool).follow(0, with_token_ids=False, heartbeat_s=0.01)
        return [
            (len(batch.events), batch.through_revision)
            for batch in (await anext(batches), await anext(batches), await anext(batches))
        ]

    assert asyncio.run(seen()) == [(1, 1), (0, 1), (0, 1)]


def test_long_backlog_comes_in_several_responses(calls):
    """A response is bounded, whatever a watcher missed."""
    driver = Driver(calls, block_count=1_000)
    count = EVENTS_PER_RESPONSE_MAX + 1
    driver.step(*(open_entry(handle, [handle] * 5) for handle in range(1, count + 1)))
    driver.step()
    with watching(calls, after_revision=0) as watch:
        assert [next(watch).through_revision for _ in range(2)] == [count - 1, count]
