"""Rule S23: sliding-window groups beside full attention, from one pool."""

import numpy as np
import pytest

from prefixd.controller.core import inspect
from prefixd.controller.core.messages import (
    DecodeOutcome,
    FreedBlock,
    GroupKind,
    GroupSpec,
    Handle,
    OpenOutcome,
    Refusal,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    open_entry,
)

PROMPT = list(range(1, 17))


def windowed(*sizes: int, block_count: int = 41) -> Driver:
    """Returns a pool of blocks of 4 with one full-attention group and windows behind it."""
    windows = (GroupSpec(GroupKind.SLIDING_WINDOW, size) for size in sizes)
    return Driver(block_count=block_count, groups=(GroupSpec(), *windows))


def tables(driver: Driver, handle: int) -> list[list[int]]:
    """Returns the tables of a sequence, one per group."""
    found = inspect.block_tables(driver.pool, driver.name(handle))
    return [table.tolist() for table in found]


def test_s23_demand_sums_over_groups() -> None:
    """One id space: each group gets its blocks, and each plan its slots."""
    driver = windowed(4, 8)
    plan = driver.open(1, PROMPT[:6]).plan
    assert [group.block_ids.tolist() for group in plan.groups] == [[1, 2], [3, 4], [5, 6]]
    assert [group.slots.first_slots.tolist() for group in plan.groups] == [[4], [12], [20]]
    assert [group.slots.slot_counts.tolist() for group in plan.groups] == [[6], [6], [6]]
    assert inspect.pool_view(driver.pool).held_block_count == 6


def test_s11_too_few_blocks_for_all_groups_change_nothing() -> None:
    """Two blocks in each of two groups are four, and three are there."""
    driver = windowed(4, block_count=6)
    driver.open(1, PROMPT[:4])
    refusal = driver.refused(open_entry(2, [90, *PROMPT[:7]]))
    assert refusal.reason == "POOL_EXHAUSTED"
    assert refusal.numbers == (("available_count", 3), ("needed_count", 4))


def test_b50_blocks_behind_the_window_are_freed_and_read_as_zero() -> None:
    """A window of 4 at position 8 sees the tokens 5 to 8: block 0 may go, block 1 may not."""
    driver = windowed(4)
    driver.open(1, PROMPT[:8])
    outcome = driver.outcome(decode_entry(driver.row(1, 50)))
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.freed_blocks == (FreedBlock(Handle(1), 1, 0, 3),)
    assert [column.tolist() for column in outcome.new_block_ids] == [[5], [6]]
    assert tables(driver, 1) == [[1, 2, 5], [0, 4, 6]]


def test_s23_a_freed_window_block_stays_cached_until_it_is_taken() -> None:
    """It stands at the end of the free order."""
    driver = windowed(4)
    driver.open(1, PROMPT[:8])
    driver.decode(1, 50)
    assert driver.free_order()[-1] == 3
    assert inspect.block(driver.pool, 3).state is inspect.BlockState.EVICTABLE
    assert inspect.block(driver.pool, 3).group_index == 1


def test_s23_a_match_needs_the_blocks_of_the_last_window_only() -> None:
    """What the first sequence freed is missing in the second one's table."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.close(1)
    opened = driver.open(2, [*PROMPT, 99])
    assert opened.plan.cached.end_token == 16
    assert tables(driver, 2) == [[1, 2, 3, 4, 9], [0, 0, 0, 8, 10]]
    assert opened.plan.groups[1].block_ids.tolist() == [0, 0, 0, 8, 10]


@pytest.mark.parametrize(("size", "needed"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_b49_a_window_needs_its_tokens_but_one(size: int, needed: int) -> None:
    """ceil((W - 1) / block_size) blocks are held behind a match."""
    driver = windowed(size)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.open(2, [*PROMPT, 99])
    assert sum(block > 0 for block in tables(driver, 2)[1][:4]) == needed


def test_b51_evicting_a_window_block_lowers_the_match_to_where_all_groups_agree() -> None:
    """Without window block 2, the longest length is two blocks: it needs block 1."""
    driver = windowed(8)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.pool.evict_blocks(block_ids={7}, digests=set())
    assert driver.match([*PROMPT, 99]).published_token_count == 8
    assert driver.match(PROMPT[:9]).published_token_count == 8


def test_s19_a_window_group_loses_only_its_own_block() -> None:
    """What stands behind an evicted window block can be matched where its window is whole."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.pool.evict_blocks(block_ids={5}, digests=set())
    assert driver.match([*PROMPT, 99]).published_token_count == 16


def test_s19_dropping_a_full_block_drops_the_windows_behind_it() -> None:
    """Dropped places are dropped in every group."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.close(1)
    dropped = driver.pool.evict_blocks(block_ids={3}, digests=set())
    assert dropped.block_count == 4
    assert [inspect.block(driver.pool, block).content for block in (7, 8)] == [
        inspect.BlockContent.PRIVATE,
        inspect.BlockContent.PRIVATE,
    ]
    assert driver.match([*PROMPT, 99]).published_token_count == 8


def test_s10_pending_window_blocks_match_within_the_step_order() -> None:
    """Equal prompts of one step share the blocks of all groups."""
    driver = windowed(4)
    reply = driver.step(open_entry(1, [*PROMPT, 90]), open_entry(2, [*PROMPT, 91]))
    second = reply.outcomes[1]
    assert isinstance(second, OpenOutcome)
    assert second.pending_token_count == 16
    assert tables(driver, 2)[1][3] == tables(driver, 1)[1][3]


def test_s22_a_window_block_that_the_step_reads_is_not_handed_out_in_it() -> None:
    """The first entry reads window block 4 and the second one frees it: a later step gets it."""
    driver = windowed(4, block_count=9)
    driver.open(1, PROMPT, schedule_token_count_max=8)
    reply = driver.step(
        extend_entry(1, [], known=16, scheduled=8, schedule_token_count_max=4),
        extend_entry(1, [], known=16, scheduled=12),
        open_entry(2, [70]),
    )
    refusal = reply.outcomes[2]
    assert isinstance(refusal, Refusal)
    assert refusal.numbers == (("available_count", 1), ("needed_count", 2))
    assert driver.free_order() == [3, 4]
    opened = driver.open(2, [70])
    assert [group.block_ids.tolist() for group in opened.plan.groups] == [[3], [4]]


def test_s16_a_fork_copies_its_partial_block_in_every_group() -> None:
    """The copies name their groups."""
    driver = windowed(4)
    driver.open(1, PROMPT[:6])
    driver.fork(1, 2, 6)
    outcome = driver.outcome(decode_entry(driver.row(2, 50)))
    assert isinstance(outcome, DecodeOutcome)
    copies = [(one.group_index, one.source_block_id, one.block_index) for one in outcome.copies]
    assert copies == [(0, 2, 1), (1, 4, 1)]


def test_s16_the_last_to_write_into_a_shared_block_needs_no_copy_in_any_group() -> None:
    """The child copies and leaves it to its parent, which writes in the same step."""
    driver = windowed(4)
    driver.open(1, PROMPT[:6])
    driver.fork(1, 2, 6)
    before = tables(driver, 1)
    outcome = driver.outcome(decode_entry(driver.row(2, 50), driver.row(1, 60)))
    assert isinstance(outcome, DecodeOutcome)
    assert [one.handle for one in outcome.copies] == [2, 2]
    assert tables(driver, 1) == before


def lost_window_block() -> Driver:
    """Returns a pool that has the first two blocks of the prompt but for the last window block."""
    driver = windowed(4)
    driver.open(1, PROMPT[:8])
    driver.close(1)
    driver.pool.evict_blocks(block_ids={4}, digests=set())
    return driver


def test_s10_a_place_is_written_once_it_is_in_all_groups() -> None:
    """The full-attention block is published, and another sequence computes the window block."""
    driver = lost_window_block()
    driver.step(open_entry(2, PROMPT[:9]), open_entry(3, PROMPT[:9]))
    assert tables(driver, 3)[1][1] == tables(driver, 2)[1][1]
    assert inspect.sequence(driver.pool, driver.name(3)).written_count == 4
    driver.step()
    assert inspect.sequence(driver.pool, driver.name(3)).written_count == 9


def test_s18_a_failed_step_refreshes_no_block() -> None:
    """What it computed again never was; the idle block is still the next cached one to go."""
    driver = lost_window_block()
    driver.step(open_entry(2, PROMPT[:9]))
    assert driver.free_order()[-2:] == [2, 4]
    applied = driver.pool.applied_step_id
    driver.step(executed=applied - 1, failed=(applied, applied))
    assert driver.free_order()[-2:] == [2, 4]


def test_s23_after_a_failed_step_a_table_ends_where_its_window_is_whole() -> None:
    """The lost step had freed the window that the published end would need."""
    driver = windowed(4)
    driver.open(1, PROMPT[:12], schedule_token_count_max=8)
    driver.step()
    entry = extend_entry(1, [], known=12, scheduled=8)
    driver.step(entry)
    applied = driver.pool.applied_step_id
    reply = driver.step(executed=applied - 1, failed=(applied, applied))
    (cut,) = reply.cut_sequences
    assert cut.scheduled_count == 8
    assert tables(driver, 1)[1] == [0, 4]
    resumed = driver.extend(1, [])
    assert resumed.plan.scheduled.end_token == 12


def test_s4_a_version_bump_forgets_window_blocks() -> None:
    """Nothing of the old version is matched in any group."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.close(1)
    assert driver.pool.set_model_version("v2") == 8
    assert driver.match([*PROMPT, 99]).published_token_count == 0


def test_s21_a_flush_drops_the_blocks_of_all_groups() -> None:
    """All of them were idle."""
    driver = windowed(4)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.step()
    assert driver.pool.flush() == 8
    assert np.all(np.sort(driver.free_order()) == np.arange(1, 41))
