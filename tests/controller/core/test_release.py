"""Releasing and evicting (S17 to S19, S21, S22)."""

import pytest

from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.messages import OpenOutcome, Refusal
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    new_block_ids,
    open_entry,
)

PROMPT = list(range(100, 113))


def test_s17_uncached_blocks_go_to_the_front_and_cached_ones_to_the_end() -> None:
    """Both tail first, so that prefixes outlive suffixes."""
    driver = Driver()
    driver.open(1, PROMPT, lookahead_slot_count=8)
    driver.close(1)
    assert driver.free_order() == [6, 5, 4, 7, 8, 9, 10, 3, 2, 1]


def test_s17_a_pending_block_counts_as_cached_when_released() -> None:
    """It goes to the end of the order, and is published when its step is confirmed."""
    driver = Driver()
    driver.step(open_entry(1, PROMPT))
    driver.step(close_entry(1), executed=0)
    assert driver.free_order()[-3:] == [3, 2, 1]
    assert driver.pending() == [1, 2, 3]
    driver.step(executed=2)
    assert sorted(driver.published()) == [1, 2, 3]


def test_s17_a_pending_block_taken_before_its_step_is_confirmed_is_never_published() -> None:
    """The later step writes something else into it."""
    driver = Driver(block_count=5)
    driver.step(open_entry(1, PROMPT))
    driver.step(close_entry(1), executed=0)
    revision = driver.pool.revision
    driver.step(open_entry(2, [7] * 9), executed=0)
    driver.step(executed=1)
    assert driver.match(PROMPT).published_token_count == 4
    assert driver.pool.revision == revision + 1


def test_s18_a_shared_block_becomes_evictable_with_its_last_holder() -> None:
    """The first close leaves the shared prefix held."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT[:8] + [9] * 5)
    driver.close(1)
    assert driver.free_order()[-1] == 3
    driver.close(2)
    assert driver.free_order()[-3:] == [5, 2, 1]


def test_s18_a_hit_refreshes() -> None:
    """The prefix used last is evicted last."""
    driver = Driver(block_count=7)
    driver.open(1, [1, 2, 3, 4, 5])
    driver.close(1)
    driver.open(2, [6, 7, 8, 9, 5])
    driver.close(2)
    driver.open(3, [1, 2, 3, 4, 6])
    driver.close(3)
    assert driver.free_order()[-2:] == [2, 1]


def test_s19_descendants_are_evicted_before_their_ancestors() -> None:
    """Whatever is evicted, nothing cached is reachable only through it."""
    driver = Driver(block_count=12)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT[:4] + [9] * 6)
    driver.open(3, PROMPT[:8] + [8] * 6)
    for handle in (3, 1, 2):
        driver.close(handle)
    for handle in range(10, 20):
        driver.open(handle, [handle])
        cached = {block.block_id for block in driver.blocks() if block.block_hash is not None}
        assert all(
            block.parent_hash is None or block.parent_hash in set(driver.published().values())
            for block in driver.blocks()
            if block.block_id in cached
        )


def test_s19_a_copy_that_outlives_its_place_keeps_the_order() -> None:
    """What a reader of a twin published is evicted before the place it stands behind."""
    driver = Driver(block_count=20)
    driver.open(1, [1, 2, 3, 4, 5])
    driver.step(open_entry(2, [1, 2, 3, 4, 6, 7, 8, 9, 5], skip_cache_read=True), executed=1)
    driver.step(close_entry(1), executed=1)
    driver.step(close_entry(2), executed=1)
    driver.step()
    assert driver.free_order()[-2:] == [4, 1]


def test_s21_flush_fails_while_blocks_are_held() -> None:
    """It says how many, and changes nothing."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step()
    before = driver.seen()
    with pytest.raises(BlocksInUse) as caught:
        driver.pool.flush()
    assert caught.value.numbers == {"held_block_count": 4, "unconfirmed_step_count": 0}
    assert driver.seen() == before


def test_s21_flush_fails_while_a_step_with_work_is_unconfirmed() -> None:
    """The worker may still write; a step that only confirms leaves it nothing to do."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(close_entry(1), executed=0)
    with pytest.raises(BlocksInUse) as caught:
        driver.pool.flush()
    assert caught.value.numbers == {"held_block_count": 0, "unconfirmed_step_count": 1}
    driver.step(executed=1)
    assert driver.pool.flush() == 3


def test_s21_flush_empties_the_index_and_keeps_the_order() -> None:
    """Blocks keep their places, nothing matches, and a second flush drops nothing."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.close(1)
    order = driver.free_order()
    revision = driver.pool.revision
    assert driver.pool.flush() == 3
    assert driver.pool.flush() == 0
    assert driver.pool.revision == revision + 1
    assert driver.free_order() == order
    assert driver.match(PROMPT).published_token_count == 0
    assert new_block_ids(driver.open(2, PROMPT)) == order[:4]


def test_s22_blocks_written_and_freed_in_one_step_are_not_handed_out_in_it() -> None:
    """They keep their place in the order, and the next step may have them."""
    driver = Driver(block_count=6)
    opened, _, refused = driver.step(
        open_entry(1, PROMPT), close_entry(1), open_entry(2, [1] * 8)
    ).outcomes
    assert isinstance(opened, OpenOutcome)
    assert isinstance(refused, Refusal)
    assert dict(refused.numbers) == {"needed_count": 2, "available_count": 1}
    assert driver.free_order() == [4, 5, 3, 2, 1]
    assert new_block_ids(driver.open(3, [1] * 8)) == [4, 5]


def test_s22_a_later_entry_may_still_match_them() -> None:
    """Withheld blocks are readable: their writer runs earlier in the same step."""
    driver = Driver(block_count=6)
    _, _, opened = driver.step(
        open_entry(1, PROMPT), close_entry(1), open_entry(2, PROMPT)
    ).outcomes
    assert isinstance(opened, OpenOutcome)
    assert opened.pending_token_count == 12
    assert new_block_ids(opened) == [1, 2, 3, 5]


def test_s22_blocks_of_a_sequence_that_the_step_does_not_touch_are_free_at_once() -> None:
    """Steps run in order, so the earlier steps that wrote them have run."""
    driver = Driver(block_count=5)
    driver.open(1, PROMPT)
    _, opened = driver.step(close_entry(1), open_entry(2, [1] * 13), executed=0).outcomes
    assert isinstance(opened, OpenOutcome)
    assert new_block_ids(opened) == [4, 3, 2, 1]


def test_s22_a_prefix_read_in_the_step_is_withheld_whoever_lets_go_last() -> None:
    """Two holders close in the step; one of them was read in it."""
    driver = Driver(block_count=6)
    driver.open(1, [1, 2, 3, 4, 5])
    driver.open(2, [1, 2, 3, 4, 6])
    *_, refused = driver.step(
        decode_entry((2, 5, 5, [7])),
        close_entry(2),
        close_entry(1),
        open_entry(3, [9] * 16),
    ).outcomes
    assert isinstance(refused, Refusal)
    assert dict(refused.numbers) == {"needed_count": 4, "available_count": 3}


def test_an_extend_that_schedules_nothing_reads_nothing() -> None:
    """Its blocks are free at once when it is closed in the same step."""
    driver = Driver(block_count=5)
    driver.open(1, PROMPT)
    *_, opened = driver.step(
        extend_entry(1, [1], known=13, scheduled=13, schedule_token_count_max=0),
        close_entry(1),
        open_entry(2, [1] * 13),
    ).outcomes
    assert isinstance(opened, OpenOutcome)
