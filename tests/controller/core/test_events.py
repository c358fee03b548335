"""The event log: what makes an event, in which order, and how much is kept (S25)."""

import pytest

from prefixd.controller.core import limits
from prefixd.controller.core.errors import EventsCompacted, FieldInvalid
from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event, PoolCleared
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import Identity, LoraAdapter, MultimodalItem
from prefixd.controller.core.pool import Pool
from tests.controller.core.driver import (
    Driver,
    close_entry,
    extend_entry,
    open_entry,
    tokens,
)
from tests.model.watcher import Watcher

DIGEST_SIZE = 32


def events(driver: Driver, *, after: int = 0) -> list[Event]:
    """Returns all events behind a revision."""
    return list(driver.pool.events.after(after, count_max=1_000_000))


def kinds(driver: Driver, *, after: int = 0) -> list[tuple[str, int]]:
    """Returns the kind of each event and how many blocks it is about."""
    return [(type(event).__name__, block_count(event)) for event in events(driver, after=after)]


def block_count(event: Event) -> int:
    """Counts the blocks that an event names."""
    return 0 if isinstance(event, PoolCleared) else len(event.digests) // DIGEST_SIZE


def bounded(bytes_kept_max: int) -> Driver:
    """Makes a pool that keeps few events."""
    driver = Driver(block_count=200)
    driver.pool = Pool(
        driver.pool.spec,
        epoch=1,
        hasher=Hasher("sha256_cbor", seed="0"),
        event_bytes_kept_max=bytes_kept_max,
    )
    return driver


def test_s25_a_run_that_is_published_at_once_is_one_event() -> None:
    """With its digests, the tokens of its full blocks, and no parent at a sequence's begin."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 114))
    driver.step()
    (event,) = events(driver)
    assert isinstance(event, BlocksStored)
    assert event.revision == driver.pool.revision == 1
    assert event.parent_hash is None
    assert event.digests == b"".join(driver.published().values())
    assert event.token_ids == tokens(range(100, 112)).tobytes()


def test_s25_a_run_behind_cached_blocks_names_its_parent() -> None:
    """The chain goes on where the cached part ends."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 109))
    driver.open(2, range(100, 118))
    driver.step()
    first, second = events(driver)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert second.parent_hash == first.digests[-DIGEST_SIZE:]
    assert block_count(second) == 2


def test_s25_extra_keys_of_each_block_stand_in_their_order() -> None:
    """What else the digests depend on can be read from the event alone."""
    identity = Identity(
        lora=LoraAdapter("l", "/l"),
        multimodal_items=(MultimodalItem("cat", 3, 2),),
        cache_salt="s",
    )
    driver = Driver(block_count=20)
    driver.open(1, range(100, 113), identity=identity)
    driver.step()
    (event,) = events(driver)
    assert isinstance(event, BlocksStored)
    lora = ("lora", "l", "/l")
    assert [event.extra_keys(index) for index in range(3)] == [
        (lora, ("mm", "cat", 3), ("cache_salt", "s")),
        (lora, ("mm", "cat", -1)),
        (lora,),
    ]


def test_s25_hits_releases_and_pending_blocks_make_no_event() -> None:
    """Only the set of published blocks counts."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 109))
    assert kinds(driver) == []
    driver.step()
    driver.open(2, range(100, 109))
    driver.close(1)
    driver.close(2)
    driver.step(open_entry(3, range(200, 209)), close_entry(3))
    assert kinds(driver) == [("BlocksStored", 2)]


def test_s25_a_failed_step_makes_no_event() -> None:
    """What it would have published never was."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 109))
    driver.step(executed=0, failed=(1, 1))
    assert kinds(driver) == []


def test_s25_second_copy_makes_no_event_and_the_last_one_that_goes_does() -> None:
    """Two sequences that computed the same blocks hold a copy each (S15)."""
    driver = Driver(block_count=7)
    prompt = range(100, 109)
    driver.step(open_entry(1, prompt), open_entry(2, prompt, skip_cache_read=True))
    driver.step()
    driver.close(1)
    driver.close(2)
    # A place with copies stands alone, so each of the two is an event; idle ones join again.
    assert kinds(driver) == [("BlocksStored", 1)] * 2
    driver.open(3, range(200, 224))
    assert kinds(driver, after=2) == [("BlocksRemoved", 2)]


def test_s25_removed_comes_before_stored_and_children_before_parents() -> None:
    """In the order of allocation, as vLLM has it."""
    driver = Driver(block_count=7)
    driver.open(1, range(100, 117))
    driver.close(1)
    driver.open(2, range(200, 217))
    driver.step()
    stored, removed, second = events(driver)
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(second, BlocksStored)
    split = [stored.digests[at : at + DIGEST_SIZE] for at in range(0, 128, DIGEST_SIZE)]
    assert removed.digests == b"".join(reversed(split[1:]))


def test_s25_flush_clears_once() -> None:
    """An empty pool stays empty without another event (S21)."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 109))
    driver.close(1)
    driver.step()
    driver.pool.flush()
    driver.pool.flush()
    assert kinds(driver, after=1) == [("PoolCleared", 0)]


def test_s4_a_version_bump_removes_held_blocks_too() -> None:
    """They can be matched no more; children go before their parents."""
    driver = Driver(block_count=20)
    driver.open(1, range(100, 109))
    driver.open(2, [*range(100, 104), *range(200, 209)])
    driver.step()
    driver.pool.set_model_version("2")
    removed = kinds(driver, after=driver.pool.revision - 3)
    assert removed == [("BlocksRemoved", count) for _, count in removed]
    assert sum(count for _, count in removed) == 4
    last = events(driver)[-1]
    assert isinstance(last, BlocksRemoved)
    stored = events(driver)[0]
    assert isinstance(stored, BlocksStored)
    assert last.digests.endswith(stored.digests[:DIGEST_SIZE]), "the root goes last"


def test_long_runs_are_split_at_the_limit() -> None:
    """Both ways; the parts join without a gap."""
    length = limits.EVENT_BLOCKS_MAX + 10
    driver = Driver(block_count=length + 2, block_size=1)
    driver.open(1, range(length))
    driver.close(1)
    first, second = events(driver)
    assert isinstance(second, BlocksStored)
    assert isinstance(first, BlocksStored)
    assert (block_count(first), block_count(second)) == (limits.EVENT_BLOCKS_MAX, 10)
    assert second.parent_hash == first.digests[-DIGEST_SIZE:]
    driver.pool.evict_blocks(block_ids={1}, digests=frozenset())
    removed = events(driver, after=2)
    assert [block_count(event) for event in removed] == [limits.EVENT_BLOCKS_MAX, 10]
    joined = b"".join(event.digests for event in removed if isinstance(event, BlocksRemoved))
    assert joined[:DIGEST_SIZE] == second.digests[-DIGEST_SIZE:]
    assert joined[-DIGEST_SIZE:] == first.digests[:DIGEST_SIZE]


def test_oldest_events_go_where_too_many_bytes_are_kept() -> None:
    """Whoever asks for one of them is told which is the oldest."""
    driver = bounded(2_000)
    for handle in range(1, 11):
        driver.open(handle, [handle] * 5)
    driver.step()
    log = driver.pool.events
    assert log.revision == 10
    kept = log.revision + 1 - log.oldest_revision
    assert 0 < kept < 10
    assert len(log.after(log.oldest_revision - 1, count_max=100)) == kept
    with pytest.raises(EventsCompacted) as raised:
        log.after(log.oldest_revision - 2, count_max=100)
    assert raised.value.numbers == {
        "after_revision": log.oldest_revision - 2,
        "oldest_revision": log.oldest_revision,
    }


def test_s25_a_place_that_a_draft_takes_is_stored_before_what_stands_behind_it() -> None:
    """A sequence wrote two blocks as drafts; another one, that has been planned later, has the
    first one's place until the drafts are executed."""
    driver = Driver(block_count=30)
    watcher = Watcher(driver.pool)
    driver.open(1, range(4))
    driver.step(extend_entry(1, [], known=4, scheduled=4, draft_token_count=8))
    driver.step(
        open_entry(2, range(9)),
        extend_entry(1, range(4, 12), known=4, scheduled=12),
        executed=1,
    )
    driver.step(executed=2)
    driver.step()
    watcher.catch_up(count_max=100)
    watcher.check()
    assert len(watcher.parents) == 3


IMAGES = tuple(MultimodalItem("cat" * 80, offset, 1) for offset in range(8))


@pytest.mark.parametrize(
    "identity",
    [Identity(lora=LoraAdapter("poet", "/" * 1_900)), Identity(multimodal_items=IMAGES)],
    ids=["lora", "images"],
)
def test_the_texts_of_an_identity_count_for_what_is_kept_and_read(identity: Identity) -> None:
    """Events whose identities are longer than all else fill neither memory nor a response."""
    driver = bounded(20_000)
    for handle in range(1, 21):
        driver.open(handle, [handle] * 9, identity=identity)
    driver.step()
    log = driver.pool.events
    assert 4 <= log.revision + 1 - log.oldest_revision <= 10
    read = log.after(log.oldest_revision - 1, count_max=100, byte_count_max=4_000)
    assert 1 < len(read) <= 3


def test_the_last_event_is_kept_whatever_its_size() -> None:
    """A watcher that is up to date can always go on."""
    driver = bounded(0)
    for handle in (1, 2):
        driver.open(handle, [handle] * 9)
    driver.step()
    assert driver.pool.events.oldest_revision == 2
    assert kinds(driver, after=1) == [("BlocksStored", 2)]


def test_reads_are_bounded_by_count_and_by_bytes() -> None:
    """At least one event comes, so that a reader always gets on."""
    driver = Driver(block_count=60)
    for handle in range(1, 11):
        driver.open(handle, [handle] * 5)
    driver.step()
    log = driver.pool.events
    assert [event.revision for event in log.after(4, count_max=3)] == [5, 6, 7]
    assert len(log.after(0, count_max=100, byte_count_max=1)) == 1
    assert len(log.after(0, count_max=100, byte_count_max=1_000_000)) == 10
    assert log.after(10, count_max=100) == ()


def test_revisions_that_the_log_has_not_reached_are_refused() -> None:
    """They are of another epoch, or made up."""
    driver = Driver()
    for revision in (-1, 1):
        with pytest.raises(FieldInvalid) as raised:
            driver.pool.events.after(revision, count_max=1)
        assert raised.value.field == "after_revision"
