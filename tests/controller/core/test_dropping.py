"""EvictBlocks: named content leaves the index, tables and free order stay (S13, S19)."""

import pytest

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import BlockNotFound
from tests.controller.core.driver import Driver, close_entry, decode_entry, open_entry

PROMPT = list(range(100, 117))


def closed(driver: Driver) -> None:
    """Caches four blocks (1 to 4) of the prompt, and leaves them idle."""
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.step()


def digest_of(driver: Driver, block_id: int) -> bytes:
    """Returns the digest of a published block."""
    digest = driver.blocks()[block_id - 1].block_hash
    assert digest is not None
    return digest


def test_s19_evicting_a_block_drops_what_is_behind_it() -> None:
    """Nothing is cached that only the evicted block led to; what is before it stays."""
    driver = Driver(block_count=20, block_size=4)
    closed(driver)
    dropped = driver.pool.evict_blocks(block_ids={2}, digests=frozenset())
    assert (dropped.block_count, dropped.held_block_count) == (3, 0)
    assert driver.match(PROMPT).published_token_count == 4
    invariants.check(driver.pool)


def test_s13_evicting_keeps_the_free_order() -> None:
    """Content is dropped, positions are kept."""
    driver = Driver(block_count=20, block_size=4)
    closed(driver)
    order = driver.free_order()
    driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    assert driver.free_order() == order
    invariants.check(driver.pool)


def test_digests_name_published_blocks() -> None:
    """A digest does what the block's id does; one that nobody has does nothing."""
    driver = Driver(block_count=20, block_size=4)
    closed(driver)
    digest = digest_of(driver, 3)
    dropped = driver.pool.evict_blocks(block_ids=frozenset(), digests={digest, bytes(32)})
    assert dropped.block_count == 2
    assert driver.pool.evict_blocks(block_ids=frozenset(), digests={digest}).block_count == 0


def test_held_blocks_lose_only_their_place() -> None:
    """They stay in the table and go to the front of the free order when it is closed (S17)."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    table = driver.table(1)
    dropped = driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    assert (dropped.block_count, dropped.held_block_count) == (2, 2)
    invariants.check(driver.pool)
    assert driver.table(1) == table
    driver.step(close_entry(1))
    assert driver.free_order()[:3] == [5, 4, 3]
    assert driver.free_order()[-2:] == [2, 1]


def test_a_sequence_on_evicted_content_publishes_and_matches_nothing_more() -> None:
    """What it computes depends on content that somebody wants gone."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    for position in range(17, 25):
        driver.step(decode_entry((1, position, position, [7])))
    driver.step()
    assert driver.match([*PROMPT, *[7] * 8]).published_token_count == 8
    assert driver.pool.state.index.pending_count == 0


def test_another_sequence_may_cache_the_content_again() -> None:
    """Evicting bans no content; the recomputed blocks are cached beside the held ones."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    driver.pool.evict_blocks(block_ids={1}, digests=frozenset())
    driver.open(2, PROMPT)
    driver.step()
    assert driver.match(PROMPT).published_token_count == 16
    assert set(driver.table(1)).isdisjoint(driver.table(2))


def test_a_copy_names_its_place() -> None:
    """A twin of an indexed block (S15) would otherwise take its place later."""
    driver = Driver(block_count=30, block_size=4)
    driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT, skip_cache_read=True))
    driver.step()
    twin = driver.table(2)[1]
    assert driver.pool.evict_blocks(block_ids={twin}, digests=frozenset()).block_count == 3
    invariants.check(driver.pool)
    driver.step(close_entry(1), close_entry(2))
    assert driver.match(PROMPT).published_token_count == 4


def test_shared_blocks_stay_with_every_holder() -> None:
    """They are free once the last of them is closed."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    driver.pool.evict_blocks(block_ids={1}, digests=frozenset())
    invariants.check(driver.pool)
    driver.step(close_entry(1))
    assert set(driver.table(2)).isdisjoint(driver.free_order())
    driver.step(close_entry(2))
    assert sorted(driver.free_order()) == list(range(1, 20))


def test_a_failed_step_cuts_to_what_is_left_of_the_path() -> None:
    """Blocks that are no longer published do not survive a failed step."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    driver.step(decode_entry((1, 17, 17, [7])), executed=driver.pool.applied_step_id)
    last = driver.pool.applied_step_id
    reply = driver.step(executed=last - 1, failed=(last, last))
    (cut,) = reply.cut_sequences
    assert cut.scheduled_count == 8


def test_block_outside_the_pool_is_refused() -> None:
    """The null block and ids beyond the last one name nothing, and nothing changes."""
    driver = Driver(block_count=20, block_size=4)
    closed(driver)
    before = driver.seen()
    for block_id in (0, 20, -1):
        with pytest.raises(BlockNotFound):
            driver.pool.evict_blocks(block_ids={1, block_id}, digests=frozenset())
    assert driver.seen() == before


def test_s16_forks_of_a_sequence_on_evicted_content_share_its_blocks() -> None:
    """A fork has the same table, and publishes nothing either."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    driver.fork(1, 2, 16)
    assert driver.table(2) == driver.table(1)[:4]
    driver.close(1)
    driver.close(2)
    assert sorted(driver.free_order()) == list(range(1, 20))
    assert driver.match(PROMPT).published_token_count == 8


def test_s16_a_fork_that_borrowed_an_evicted_block_keeps_it() -> None:
    """Its partial block stays in its table; it publishes nothing more."""
    driver = Driver(block_count=20, block_size=4)
    driver.open(1, PROMPT)
    driver.step()
    driver.fork(1, 2, 10)
    dropped = driver.pool.evict_blocks(block_ids={3}, digests=frozenset())
    assert dropped.block_count == 2
    invariants.check(driver.pool)
    assert driver.table(2) == driver.table(1)[:3]
    assert driver.sequence(2).uncacheable
    driver.close(1)
    for token_id in range(4):
        driver.decode(2, token_id)
    driver.close(2)
    assert sorted(driver.free_order()) == list(range(1, 20))
