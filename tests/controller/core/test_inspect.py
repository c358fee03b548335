"""What operators see of a pool."""

import pytest

from prefixd.controller.core import inspect
from prefixd.controller.core.errors import BlockNotFound, SequenceNotFound
from prefixd.controller.core.inspect import BlockContent, BlockState
from prefixd.controller.core.messages import Identity
from tests.controller.core.driver import Driver, close_entry, open_entry

PROMPT = list(range(100, 113))


@pytest.fixture
def driver() -> Driver:
    """A pool with a closed sequence of 13 tokens, an open one that shares 8 of them, and a pending
    one."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.open(2, [*PROMPT[:8], 9, 9])
    driver.step(close_entry(1))
    driver.step(open_entry(3, [7] * 5))
    return driver


def test_accounts_add_up(driver: Driver) -> None:
    """free + evictable + held = block_count - 1; published and pending count the index."""
    view = inspect.pool_view(driver.pool)
    assert (view.free_block_count, view.evictable_block_count, view.held_block_count) == (13, 1, 5)
    assert (view.published_block_count, view.pending_block_count) == (3, 1)
    assert (view.sequence_count, view.applied_step_id, view.executed_step_id) == (2, 4, 3)


def test_blocks_show_state_content_and_place(driver: Driver) -> None:
    """One of each kind."""
    rows = {row.block_id: row for row in driver.blocks()}
    assert (rows[1].state, rows[1].content) == (BlockState.HELD, BlockContent.PUBLISHED)
    assert (rows[3].state, rows[3].content) == (BlockState.EVICTABLE, BlockContent.PUBLISHED)
    assert (rows[5].state, rows[5].content) == (BlockState.HELD, BlockContent.PRIVATE)
    assert (rows[7].state, rows[7].content) == (BlockState.FREE, BlockContent.PRIVATE)
    assert [rows[block].block_index for block in (1, 2, 3, 5)] == [0, 1, 2, None]
    assert [rows[block].holder_count for block in (1, 2, 3, 5)] == [1, 1, 0, 1]
    assert rows[1].parent_hash is None
    assert rows[2].parent_hash == rows[1].block_hash
    assert rows[3].parent_hash == rows[2].block_hash


def test_s10_a_pending_block_stands_in_no_digest_answer(driver: Driver) -> None:
    """It is shown as pending, with its place and without its digest."""
    (block_id,) = driver.pending()
    row = inspect.block(driver.pool, block_id)
    assert (row.content, row.block_index) == (BlockContent.PENDING, 0)
    assert (row.block_hash, row.parent_hash) == (None, None)


def test_blocks_are_paged_by_id_and_state(driver: Driver) -> None:
    """Pages join without gap or repeat."""
    everything = driver.blocks()
    pages, after = [], 0
    while page := inspect.blocks(driver.pool, after=after, count=7):
        pages.extend(page)
        after = page[-1].block_id
    assert tuple(pages) == everything
    for state in BlockState:
        rows = inspect.blocks(driver.pool, after=0, count=100, state=state)
        assert rows == tuple(row for row in everything if row.state is state)


def test_sequences_are_paged_by_id() -> None:
    """In the order of their ids, whatever order they were opened in."""
    driver = Driver(block_count=20)
    for handle, name in enumerate(("c", "a", "d", "b"), start=1):
        driver.open(handle, [handle], sequence_id=name)
    first = inspect.sequences(driver.pool, after="", count=3)
    second = inspect.sequences(driver.pool, after=first[-1].sequence_id, count=3)
    assert [row.sequence_id for row in first + second] == ["a", "b", "c", "d"]


def test_a_sequence_shows_its_positions() -> None:
    """Known, scheduled, written and cached are told apart."""
    driver = Driver(block_count=20)
    identity = Identity(cache_salt="x")
    driver.open(1, PROMPT, identity=identity)
    driver.open(2, PROMPT, identity=identity, schedule_token_count_max=0, preemption_count=2)
    view = driver.sequence(2)
    assert (view.known_count, view.scheduled_count, view.written_count) == (13, 12, 12)
    assert (view.cached_count, view.block_count, view.preemption_count) == (12, 3, 2)
    assert view.identity == identity


def test_holders_are_named(driver: Driver) -> None:
    """By id, at most as many as asked for."""
    driver.open(4, PROMPT)
    assert inspect.holders(driver.pool, 1, count=10) == ("s2", "s4")
    assert inspect.holders(driver.pool, 1, count=1) == ("s2",)
    assert inspect.holders(driver.pool, 19, count=10) == ()


@pytest.mark.parametrize("block_id", [-1, 0, 20])
def test_blocks_outside_the_pool_are_not_found(driver: Driver, block_id: int) -> None:
    """Block 0 is no block that anybody could ask about."""
    with pytest.raises(BlockNotFound):
        inspect.block(driver.pool, block_id)
    with pytest.raises(BlockNotFound):
        inspect.holders(driver.pool, block_id, count=1)


def test_a_closed_sequence_is_not_found(driver: Driver) -> None:
    """Its id may be used again."""
    for read in (inspect.sequence, inspect.block_tables):
        with pytest.raises(SequenceNotFound):
            read(driver.pool, "s1")


def test_digests_are_computed_when_blocks_are_published_or_in_slices() -> None:
    """Both ways give the same; a slice is bounded."""
    read, sliced = Driver(block_count=100), Driver(block_count=100)
    for driver in (read, sliced):
        driver.open(1, list(range(132)))
    slices = 1
    while sliced.pool.hash_slice(10):
        slices += 1
    assert slices == 4
    assert not sliced.pool.digests.unhashed
    for driver in (read, sliced):
        driver.step()
    assert read.published() == sliced.published()
    assert len(read.published()) == 33
