"""Events, digests and counts of sliding-window groups (rules S24, S25)."""

from prefixd.controller.core import inspect
from prefixd.controller.core.audit import audit
from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event
from prefixd.controller.core.inspect import BlockContent
from prefixd.controller.core.messages import GroupKind, GroupSpec, Identity, MultimodalItem
from prefixd.controller.core.pool import Pool
from tests.controller.core.driver import Driver, close_entry, tokens
from tests.model.colliding import CollidingHasher

PROMPT = list(range(1, 17))
DIGEST_SIZE = 32


def windowed(*sizes: int, block_count: int = 41) -> Driver:
    """Returns a pool of blocks of 4 with one full-attention group and windows behind it."""
    windows = (GroupSpec(GroupKind.SLIDING_WINDOW, size) for size in sizes)
    return Driver(block_count=block_count, groups=(GroupSpec(), *windows))


def events(driver: Driver, *, after: int = 0) -> list[Event]:
    """Returns all events behind a revision."""
    return list(driver.pool.events.after(after, count_max=1_000))


def cached(driver: Driver, **fields: object) -> None:
    """Computes and publishes the prompt, and lets its sequence go."""
    driver.open(1, PROMPT, **fields)
    driver.step(close_entry(1))
    driver.step()


def test_s25_each_group_tells_its_own_run() -> None:
    """With one digest for one content, and the same parent and tokens."""
    driver = windowed(4, 8)
    driver.open(1, PROMPT, schedule_token_count_max=8)
    driver.extend(1, [])
    driver.step()
    stored = events(driver)
    assert all(isinstance(event, BlocksStored) for event in stored)
    by_group = [
        [
            (event.parent_hash, event.digests, event.token_ids)
            for event in stored
            if isinstance(event, BlocksStored) and event.group_index == group_index
        ]
        for group_index in range(3)
    ]
    assert by_group[0] == by_group[1] == by_group[2]
    (_, first, _), (parent, second, token_ids) = by_group[0]
    assert parent == first[-DIGEST_SIZE:]
    assert len(second) == 2 * DIGEST_SIZE
    assert token_ids == tokens(PROMPT[8:]).tobytes()


def test_s25_a_window_block_shows_its_digest_once_it_is_published() -> None:
    """The digest is that of the full-attention block with its content."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    assert driver.published() == {}
    assert inspect.block(driver.pool, 6).content is BlockContent.PENDING
    driver.step()
    for full, window in ((1, 5), (2, 6), (3, 7), (4, 8)):
        shown = inspect.block(driver.pool, window)
        assert shown.block_hash == inspect.block(driver.pool, full).block_hash
        assert shown.parent_hash == inspect.block(driver.pool, full).parent_hash
        assert (shown.group_index, shown.block_index) == (1, full - 1)


def test_b52_every_full_window_block_is_cached_and_told() -> None:
    """A prompt may part from another behind any block, and finds the window there."""
    driver = windowed(4)
    cached(driver)
    stored = [event for event in events(driver) if isinstance(event, BlocksStored)]
    assert {event.group_index: len(event.digests) // DIGEST_SIZE for event in stored} == {
        0: 4,
        1: 4,
    }
    for length in (4, 8, 12, 16):
        assert driver.match([*PROMPT[:length], 99]).published_token_count == length


def test_s25_extra_keys_stand_in_the_events_of_window_blocks() -> None:
    """A consumer can compute their digests as those of the first group."""
    driver = windowed(4)
    identity = Identity(multimodal_items=(MultimodalItem("cat", 3, 2),), cache_salt="s")
    driver.open(1, PROMPT, identity=identity)
    driver.step()
    full, window = events(driver)
    assert isinstance(full, BlocksStored)
    assert isinstance(window, BlocksStored)
    assert (full.group_index, window.group_index) == (0, 1)
    assert window.digests == full.digests
    assert [window.extra_keys(at) for at in range(4)] == [full.extra_keys(at) for at in range(4)]


def test_s25_an_evicted_window_block_is_removed_alone() -> None:
    """Neither its children nor the other groups lose anything (S19)."""
    driver = windowed(4)
    cached(driver)
    digest = inspect.block(driver.pool, 6).block_hash
    before = driver.pool.revision
    driver.pool.evict_blocks(block_ids={6}, digests=frozenset())
    (removed,) = events(driver, after=before)
    assert removed == BlocksRemoved(before + 1, 1, digest or b"")
    assert set(driver.published()) == {1, 2, 3, 4, 5, 7, 8}


def test_s25_a_window_block_may_be_stored_behind_a_parent_that_is_not() -> None:
    """What stands before the window of a match is not held, so it may be gone for long."""
    driver = windowed(4)
    cached(driver)
    driver.pool.evict_blocks(block_ids={5, 6, 7}, digests=frozenset())
    before = driver.pool.revision
    driver.open(2, [*PROMPT, *range(50, 55)])
    driver.step()
    stored = [event for event in events(driver, after=before) if isinstance(event, BlocksStored)]
    fourth = inspect.block(driver.pool, 8).block_hash
    assert [(event.group_index, event.parent_hash) for event in stored] == [
        (0, fourth),
        (1, fourth),
    ]
    driver.pool.evict_blocks(block_ids={8}, digests=frozenset())
    assert driver.published().keys() & {5, 6, 7, 8} == set()


def test_s13_an_eviction_of_a_window_block_is_told_and_counted() -> None:
    """It is taken for new use like any other."""
    driver = windowed(4, block_count=9)
    cached(driver)
    before = driver.pool.revision
    driver.open(2, [90])
    assert [type(event) for event in events(driver, after=before)] == [BlocksRemoved] * 2
    assert inspect.pool_view(driver.pool).statistics.evicted_block_count == 2


def test_s24_counts_are_those_of_all_groups() -> None:
    """Pending, then published; a hit counts the age of each block that it holds."""
    driver = windowed(4, 8)
    driver.open(1, PROMPT)
    view = inspect.pool_view(driver.pool)
    assert (view.published_block_count, view.pending_block_count) == (0, 12)
    driver.step(close_entry(1))
    driver.step()
    view = inspect.pool_view(driver.pool)
    assert (view.published_block_count, view.pending_block_count) == (12, 0)
    driver.open(2, [*PROMPT, 99])
    ages = inspect.pool_view(driver.pool).statistics.age_at_hit
    assert sum(ages.block_counts) == 4 + 1 + 2


def test_s21_a_flush_is_one_event_for_all_groups() -> None:
    """What is published afterwards is stored again in each."""
    driver = windowed(4)
    cached(driver)
    before = driver.pool.revision
    driver.pool.flush()
    assert driver.pool.revision == before + 1
    cached(driver)
    assert [
        event.group_index
        for event in events(driver, after=before + 1)
        if isinstance(event, BlocksStored)
    ] == [0, 1]


def test_s4_a_version_bump_removes_the_blocks_of_all_groups() -> None:
    """Held ones too: nothing of the old version can be matched."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.step()
    before = driver.pool.revision
    driver.pool.set_model_version("2")
    removed = [event for event in events(driver, after=before) if isinstance(event, BlocksRemoved)]
    assert {event.group_index: len(event.digests) // DIGEST_SIZE for event in removed} == {
        0: 4,
        1: 4,
    }
    assert driver.published() == {}


def test_eviction_by_digest_drops_the_content_in_every_group() -> None:
    """Also where only a window group has it still."""
    driver = windowed(4)
    cached(driver)
    published = driver.published()
    driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    assert set(driver.published()) == {1, 2, 5, 6}
    driver.pool.evict_blocks(block_ids=frozenset(), digests={published[2]})
    assert set(driver.published()) == {1, 5}
    driver.pool.evict_blocks(block_ids={1}, digests=frozenset())
    assert driver.published() == {}


def test_an_audit_counts_the_digests_of_all_groups() -> None:
    """Pending ones are computed for it."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    found = audit(driver.pool)
    assert (found.cached_block_count, found.digest_count) == (8, 8)
    assert not driver.pool.hash_slice(1)


def test_s25_each_group_counts_its_colliding_digests() -> None:
    """With one digest for all contents, each group stores it once and removes it with the last."""
    driver = windowed(4)
    driver.pool = Pool(driver.pool.spec, epoch=1, hasher=CollidingHasher(1))
    cached(driver)
    assert [event.group_index for event in events(driver)] == [0, 1]
    driver.pool.evict_blocks(block_ids={5, 6, 7}, digests=frozenset())
    assert driver.pool.revision == 2
    driver.pool.evict_blocks(block_ids={8}, digests=frozenset())
    assert [event.group_index for event in events(driver, after=2)] == [1]
