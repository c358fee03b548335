"""Blocks with equal content (S15)."""

from prefixd.controller.core.inspect import BlockContent
from prefixd.controller.core.messages import OpenOutcome, PrefixMatch
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    open_entry,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def content(driver: Driver, block_id: int) -> BlockContent:
    """Tells whether a block can be matched."""
    return driver.blocks()[block_id - 1].content


def copied_between() -> Driver:
    """Returns a pool in which a sequence has gone whose block 2 was written before its twin.

    Step 1 writes the sequence's three places, as drafts; step 2 writes the second place for another
    prompt; then the drafts turn out to be right, so the second is a copy and the third is indexed.
    """
    driver = Driver(block_size=1)
    driver.step(open_entry(1, [1]), extend_entry(1, [], known=1, scheduled=1, draft_token_count=2))
    driver.step(open_entry(2, [1, 5]), executed=0)
    driver.step(extend_entry(1, [5, 7], known=1, scheduled=3), executed=0)
    driver.step(close_entry(1), executed=0)
    return driver


def test_s15_what_stands_behind_a_copy_waits_for_the_indexed_block_when_the_copy_goes() -> None:
    """A block is published no earlier than its parent, which another sequence writes later."""
    driver = copied_between()
    driver.step(executed=1)
    assert driver.match([1, 5, 7, 9]) == PrefixMatch(1, 2)
    driver.step(executed=2)
    assert driver.match([1, 5, 7, 9]) == PrefixMatch(3, 0)


def test_s15_what_stood_behind_a_copy_goes_with_the_indexed_block_if_that_fails() -> None:
    """A failed step takes the place, and everything behind it."""
    driver = copied_between()
    driver.step(executed=1, failed=(2, 4))
    assert driver.match([1, 5, 7, 9]) == PrefixMatch(1, 0)


def test_s15_a_block_equal_to_an_idle_one_takes_its_place_when_it_is_written() -> None:
    """The last block of an equal prompt is computed again; the old one goes to the very front."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.close(1)
    digests = driver.published()
    driver.open(2, PROMPT)
    assert driver.table(2) == [1, 3]
    assert content(driver, 3) is BlockContent.PRIVATE
    revision = driver.pool.revision
    driver.step()
    assert content(driver, 3) is BlockContent.PUBLISHED
    assert driver.free_order() == [2, 4, 5, 6, 7, 8, 9, 10]
    assert driver.published() == {1: digests[1], 3: digests[2]}
    assert driver.pool.revision == revision, "the set of published digests has not changed"


def test_s15_an_idle_twin_survives_a_failed_step() -> None:
    """The copy was never written, so the old block stays what it was, with what follows it."""
    driver = Driver()
    driver.open(1, [*PROMPT, 9, 9, 9, 9, 5])
    driver.close(1)
    digests = driver.published()
    driver.step(open_entry(2, PROMPT))
    driver.step(failed=(3, 3), executed=2)
    assert driver.published() == digests
    assert driver.match([*PROMPT, 9, 9, 9, 9, 5]).published_token_count == 12


def test_s15_a_block_equal_to_a_held_one_stays_private() -> None:
    """It stands in its table only, and matches find the first one."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    assert driver.table(2) == [1, 3]
    assert content(driver, 3) is BlockContent.PRIVATE
    driver.open(3, [*PROMPT, 9])
    assert driver.table(3) == [1, 2, 4]


def test_s15_the_place_passes_to_a_living_copy() -> None:
    """When the last table with the indexed block lets go; the block is uncached then."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    revision = driver.pool.revision
    driver.close(1)
    assert content(driver, 3) is BlockContent.PUBLISHED
    assert driver.free_order() == [2, 4, 5, 6, 7, 8, 9, 10]
    assert driver.pool.revision == revision
    driver.close(2)
    assert driver.free_order()[-2:] == [3, 1]


def test_s15_a_copy_is_freed_uncached_while_the_place_is_held() -> None:
    """It goes to the front; the indexed block stays."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.close(2)
    assert driver.free_order()[0] == 3
    assert content(driver, 2) is BlockContent.PUBLISHED


def test_s15_the_first_written_wins_against_a_pending_twin() -> None:
    """A copy scheduled by an earlier step takes a place whose block waits for a later one."""
    driver = Driver()
    driver.open(1, PROMPT[:7])
    driver.step(decode_entry((1, 7, 7, [])), executed=1)
    driver.step(open_entry(2, PROMPT, skip_cache_read=True), executed=1)
    driver.step(decode_entry((1, 8, 7, [8])), executed=1)
    assert (driver.table(1), driver.table(2)) == ([1, 2, 5], [3, 4])
    assert content(driver, 4) is BlockContent.PENDING
    assert content(driver, 2) is BlockContent.PRIVATE
    driver.step(executed=2)
    assert content(driver, 2) is BlockContent.PUBLISHED
    assert content(driver, 4) is BlockContent.PRIVATE
    driver.step(executed=3)
    assert content(driver, 4) is BlockContent.PRIVATE


def test_s15_an_idle_block_with_an_unwritten_copy_may_be_taken() -> None:
    """Its place goes to the copy, pending, and what follows the copy stays reachable."""
    driver = Driver(block_count=6)
    driver.open(1, PROMPT[:4])
    driver.step(close_entry(1))
    driver.step(open_entry(2, [*PROMPT, 9], skip_cache_read=True), executed=2)
    assert driver.free_order() == [5, 1]
    assert content(driver, 1) is BlockContent.PUBLISHED
    driver.step(open_entry(3, [50] * 8), executed=2)
    assert content(driver, 2) is BlockContent.PENDING
    driver.step()
    assert driver.match([*PROMPT, 9]).published_token_count == 8
    assert sorted(driver.published())[:2] == [1, 2]


def test_s15_nothing_is_held_that_stands_in_no_table() -> None:
    """After the last close every block is free or evictable."""
    driver = Driver(block_count=30)
    entries = [
        open_entry(handle, PROMPT, skip_cache_read=handle % 2 == 0) for handle in range(1, 7)
    ]
    outcomes = driver.step(*entries).outcomes
    assert all(isinstance(outcome, OpenOutcome) for outcome in outcomes)
    driver.step(*(close_entry(handle) for handle in (3, 1, 5, 2, 6, 4)))
    driver.step()
    assert sorted(driver.free_order()) == list(range(1, 30))
    assert len(driver.published()) == 2
