"""How blocks are given (S11 to S14), and what a plan says."""

import numpy as np
import pytest

from prefixd.controller.core.messages import (
    DecodeOutcome,
    DeferredRow,
    ExtendOutcome,
    Identity,
    OpenOutcome,
    TokenRange,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    new_block_ids,
    open_entry,
    slots,
)

PROMPT = list(range(100, 113))


def test_s11_an_open_that_does_not_fit_changes_nothing() -> None:
    """It says how many blocks were needed and how many there are."""
    driver = Driver(block_count=6)
    driver.open(1, PROMPT)
    refusal = driver.refused(open_entry(2, list(range(8))))
    assert refusal.reason == "POOL_EXHAUSTED"
    assert dict(refusal.numbers) == {"needed_count": 2, "available_count": 1}


def test_s11_an_extend_that_does_not_fit_records_no_token() -> None:
    """The tokens of a refused extend are not known afterwards."""
    driver = Driver(block_count=5)
    driver.open(1, PROMPT)
    refusal = driver.refused(extend_entry(1, [1, 2, 3, 4], known=13, scheduled=13))
    assert refusal.reason == "SEQUENCE_EXCEEDS_POOL"
    driver.extend(1, [1, 2, 3])


def test_s11_entries_behind_a_refused_one_are_applied() -> None:
    """All or nothing holds per entry, not per step."""
    driver = Driver(block_count=6)
    refused, opened = driver.step(open_entry(1, list(range(40))), open_entry(2, PROMPT)).outcomes
    assert refused.reason == "SEQUENCE_EXCEEDS_POOL"
    assert isinstance(opened, OpenOutcome)


def test_s12_a_sequence_cannot_evict_its_own_prefix() -> None:
    """Matched blocks are held before new ones are taken, even the ones first in line."""
    driver = Driver(block_count=6)
    driver.open(1, PROMPT[:9])
    driver.close(1)
    driver.open(2, [1, 2, 3, 4, 5])
    driver.close(2)
    assert driver.free_order() == [4, 5, 2, 1, 3]
    assert new_block_ids(driver.open(3, PROMPT[:8] + [7] * 9)) == [1, 2, 4, 5, 3]


def test_s12_idle_matched_blocks_count_against_the_supply() -> None:
    """Two of the five free blocks are the match itself, so only three are left for new use."""
    driver = Driver(block_count=6)
    driver.open(1, PROMPT[:9])
    driver.close(1)
    refusal = driver.refused(open_entry(2, PROMPT[:8] + [7] * 13, lookahead_slot_count=0))
    assert refusal.reason == "SEQUENCE_EXCEEDS_POOL"
    driver.open(3, [1, 2])
    refusal = driver.refused(open_entry(4, PROMPT[:8] + [7] * 9))
    assert refusal.reason == "POOL_EXHAUSTED"
    assert dict(refusal.numbers) == {"needed_count": 5, "available_count": 4}


def test_s13_fresh_pool_ids_ascend_from_one() -> None:
    """Block 0 is never handed out."""
    driver = Driver(block_count=11)
    assert new_block_ids(driver.open(1, PROMPT)) == [1, 2, 3, 4]
    assert new_block_ids(driver.open(2, [1, 2, 3, 4, 5])) == [5, 6]
    assert driver.free_order() == [7, 8, 9, 10]


def test_s13_content_is_lost_only_when_its_block_is_taken() -> None:
    """A closed sequence's blocks stay matchable until the last free block is gone."""
    driver = Driver(block_count=7)
    driver.open(1, PROMPT[:9])
    driver.close(1)
    driver.open(2, list(range(12)))
    assert driver.match(PROMPT[:9]).published_token_count == 8
    assert driver.pool.state.statistics.evicted_block_count == 0
    driver.decode(2, 55)
    driver.open(3, [0])
    assert driver.match(PROMPT[:9]).published_token_count == 4
    assert driver.pool.state.statistics.evicted_block_count == 1


def test_s14_lookahead_slots_get_blocks_and_are_reused() -> None:
    """Blocks reserved for speculation take the tokens that come, and are never published empty."""
    driver = Driver()
    opened = driver.open(1, PROMPT[:4], lookahead_slot_count=5)
    assert new_block_ids(opened) == [1, 2, 3]
    assert slots(opened) == list(range(4, 13))
    driver.step()
    assert sorted(driver.published()) == [1]
    assert driver.decode(1, 9) == 0
    extended = driver.extend(1, [8, 7, 6])
    assert new_block_ids(extended) == []
    driver.step()
    assert sorted(driver.published()) == [1, 2]


def test_s14_a_rollback_lets_rejected_drafts_be_scheduled_again() -> None:
    """Positions behind the accepted ones are written a second time, in the same slots."""
    driver = Driver()
    driver.open(1, PROMPT[:4])
    drafted = driver.extend(1, [50], draft_token_count=4)
    assert drafted.plan.scheduled == TokenRange(4, 9)
    again = driver.extend(1, [51, 52], rollback_to_token_count=6, draft_token_count=2)
    assert again.plan.scheduled == TokenRange(6, 9)
    assert slots(again) == [10, 11, 12]
    assert driver.sequence(1).written_count == 6


def test_s14_a_rolled_back_position_belongs_to_the_step_that_wrote_it_last() -> None:
    """A block whose last position was rejected and written again waits for the later step."""
    driver = Driver()
    driver.open(1, PROMPT[:4])
    driver.step(extend_entry(1, [50], known=4, scheduled=4, draft_token_count=3), executed=1)
    driver.step(extend_entry(1, [51], known=5, scheduled=8, rollback_to_token_count=6), executed=1)
    driver.step(extend_entry(1, [52, 53], known=6, scheduled=6), executed=1)
    assert driver.pending() == [2]
    driver.step(executed=3)
    assert driver.pending() == [2]
    driver.step(executed=4)
    assert driver.pending() == []


def test_must_fit_looks_ahead_to_the_whole_prompt() -> None:
    """A first chunk that would fit is refused where the whole prompt would not."""
    driver = Driver(block_count=6)
    driver.open(1, [1, 2, 3, 4, 5])
    entry = open_entry(2, PROMPT, schedule_token_count_max=4, must_fit_token_count=13)
    refusal = driver.refused(entry)
    assert dict(refusal.numbers) == {"needed_count": 4, "available_count": 3}
    driver.close(1)
    assert new_block_ids(driver.open(2, PROMPT, schedule_token_count_max=4)) == [2]


def test_a_prompt_longer_than_the_pool_may_be_opened_with_a_small_chunk() -> None:
    """What counts is the blocks that the entry needs, not the prompt's length."""
    driver = Driver(block_count=4)
    driver.open(1, list(range(40)), schedule_token_count_max=8)
    refusal = driver.refused(extend_entry(1, [], known=40, scheduled=8, schedule_token_count_max=8))
    assert refusal.reason == "SEQUENCE_EXCEEDS_POOL"
    assert dict(refusal.numbers) == {"needed_count": 4, "available_count": 3}


def test_chunks_of_a_prompt_are_planned_one_behind_the_other() -> None:
    """Absolute positions, slots of the scheduled positions only."""
    driver = Driver()
    first = driver.open(1, PROMPT, schedule_token_count_max=6)
    assert first.plan.scheduled == TokenRange(0, 6)
    second = driver.extend(1, [], schedule_token_count_max=5)
    assert second.plan.scheduled == TokenRange(6, 11)
    assert second.plan.groups[0].start_block == 2
    assert slots(first) + slots(second) == list(range(4, 15))
    assert driver.extend(1, []).plan.scheduled == TokenRange(11, 13)


def test_slots_follow_scattered_blocks() -> None:
    """Runs break where block ids do."""
    driver = Driver(block_count=8)
    driver.open(1, [1, 2])
    driver.open(2, [3, 4])
    driver.open(3, [5, 6])
    driver.step(close_entry(3), close_entry(1))
    opened = driver.open(4, list(range(10)))
    assert new_block_ids(opened) == [1, 3, 4]
    runs = opened.plan.groups[0].slots
    assert runs.first_slots.tolist() == [4, 12]
    assert runs.slot_counts.tolist() == [4, 6]


def test_token_budget_clips_and_then_refuses() -> None:
    """Entries consume it in order; a cached prefix costs nothing; nothing left is refused."""
    driver = Driver(block_count=30)
    driver.open(1, PROMPT)
    hit, clipped, refused, row = driver.step(
        open_entry(2, PROMPT),
        open_entry(3, list(range(9))),
        open_entry(4, list(range(20, 29))),
        decode_entry((1, 13, 13, [5])),
        budget=5,
    ).outcomes
    assert isinstance(hit, OpenOutcome)
    assert hit.plan.scheduled == TokenRange(12, 13)
    assert isinstance(clipped, OpenOutcome)
    assert clipped.plan.scheduled == TokenRange(0, 4)
    assert refused.reason == "TOKEN_BUDGET"
    assert isinstance(row, DecodeOutcome)
    assert row.deferred_rows == (DeferredRow(0, "TOKEN_BUDGET"),)


def test_a_budget_for_some_rows_is_spent_in_order() -> None:
    """Rows behind the last affordable one are deferred and record no token."""
    driver = Driver(block_count=30)
    for handle in (1, 2, 3):
        driver.open(handle, [handle, 5])
    entry = decode_entry((3, 2, 2, [9]), (1, 2, 2, [9]), (2, 2, 2, [9]))
    outcome = driver.outcome(entry, budget=2)
    assert isinstance(outcome, DecodeOutcome)
    assert [row.row for row in outcome.deferred_rows] == [2]
    assert [driver.sequence(handle).known_count for handle in (1, 2, 3)] == [3, 2, 3]


def test_decode_rows_get_blocks_in_order() -> None:
    """Rows at the end of their block get the next blocks in row order, the others none."""
    driver = Driver(block_count=30)
    driver.step(*(open_entry(handle, [handle] * (3 + handle % 2)) for handle in range(1, 6)))
    entry = decode_entry(
        *((handle, 3 + handle % 2, 3 + handle % 2, [7]) for handle in (5, 4, 3, 2, 1))
    )
    outcome = driver.outcome(entry)
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.new_block_ids[0].tolist() == [6, 0, 7, 0, 8]


def test_a_decode_row_without_a_block_is_deferred_and_the_others_go_on() -> None:
    """The last free block goes to the first row that needs one."""
    driver = Driver(block_count=4)
    driver.open(1, [1, 2, 3, 4])
    driver.open(2, [5, 6, 7, 8])
    entry = decode_entry((2, 4, 4, [9]), (1, 4, 4, [9]))
    outcome = driver.outcome(entry)
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.new_block_ids[0].tolist() == [3, 0]
    assert outcome.deferred_rows == (DeferredRow(1, "POOL_EXHAUSTED", 1, 0),)
    assert driver.sequence(1).known_count == 4


def test_decode_rows_with_wrong_positions_are_deferred() -> None:
    """Each says what it expected and what is; unknown handles are not found."""
    driver = Driver(block_count=30)
    for handle in (1, 2, 3):
        driver.open(handle, [handle, 5])
    entry = decode_entry((1, 3, 2, [9]), (2, 2, 1, [9]), (9, 2, 2, [9]), (3, 2, 2, [9]))
    outcome = driver.outcome(entry)
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.deferred_rows == (
        DeferredRow(0, "POSITION_MISMATCH", 3, 2),
        DeferredRow(1, "POSITION_MISMATCH", 1, 2),
        DeferredRow(2, "SEQUENCE_NOT_FOUND"),
    )
    assert driver.sequence(3).scheduled_count == 3


@pytest.mark.parametrize("token_count", [0, 1, 2, 5])
def test_a_decode_row_takes_any_number_of_tokens(token_count: int) -> None:
    """One position is scheduled, however many tokens the row supplies."""
    driver = Driver(block_count=30)
    driver.open(1, [1, 2, 3])
    driver.outcome(decode_entry((1, 3, 3, list(range(token_count)))))
    view = driver.sequence(1)
    assert (view.known_count, view.scheduled_count) == (3 + token_count, 4)


def test_plain_and_single_rows_do_the_same() -> None:
    """A whole column of regular rows ends as the same rows sent one by one."""
    together, alone = Driver(block_count=60), Driver(block_count=60)
    handles = list(range(1, 9))
    for driver in (together, alone):
        driver.step(*(open_entry(handle, [handle % 3] * handle) for handle in handles))
    for round_index in range(12):
        rows = [
            (handle, handle + round_index, handle + round_index, [round_index % 2])
            for handle in handles
        ]
        together.step(decode_entry(*rows))
        alone.step(*(decode_entry(row) for row in rows))
        assert together.seen()[:4] == alone.seen()[:4]


def test_opening_twice_is_refused() -> None:
    """Neither a handle nor an id may be open twice; both are free again after the close."""
    driver = Driver()
    driver.open(1, [1, 2])
    assert driver.refused(open_entry(1, [3], sequence_id="other")).reason == "SEQUENCE_EXISTS"
    assert driver.refused(open_entry(2, [3], sequence_id="s1")).reason == "SEQUENCE_EXISTS"
    driver.close(1)
    driver.open(1, [3])


def test_unknown_handles_are_refused() -> None:
    """Extends and closes of sequences that are not open change nothing."""
    driver = Driver()
    assert driver.refused(close_entry(5)).reason == "SEQUENCE_NOT_FOUND"
    assert driver.refused(extend_entry(5, [1], known=1, scheduled=1)).reason == "SEQUENCE_NOT_FOUND"


def test_an_extend_with_nothing_to_schedule_records_its_tokens() -> None:
    """It is legal, and costs no block."""
    driver = Driver()
    driver.open(1, PROMPT)
    extended = driver.extend(1, [1, 2, 3, 4, 5], schedule_token_count_max=0)
    assert isinstance(extended, ExtendOutcome)
    assert new_block_ids(extended) == []
    assert driver.sequence(1).known_count == 18


def test_a_draining_pool_refuses_new_sequences_only() -> None:
    """Open sequences go on."""
    driver = Driver()
    driver.open(1, [1, 2])
    driver.pool.drain()
    assert driver.refused(open_entry(2, [1])).reason == "DRAINING"
    driver.decode(1, 3)


def test_columns_grow_beyond_their_first_size() -> None:
    """Two hundred sequences keep their tokens and positions."""
    driver = Driver(block_count=500)
    entries = [open_entry(handle, [handle, handle + 1, handle + 2]) for handle in range(200)]
    driver.step(*entries)
    driver.step(decode_entry(*((handle, 3, 3, [7]) for handle in range(200))))
    driver.step()
    assert len(driver.published()) == 200
    assert driver.match([150, 151, 152, 7, 1]).published_token_count == 4


def test_plan_arrays_are_copies() -> None:
    """A kept reply does not change when the sequence goes on."""
    driver = Driver()
    opened = driver.open(1, PROMPT, identity=Identity(cache_salt="x"))
    before = np.array(opened.plan.groups[0].block_ids)
    driver.close(1)
    reopened = driver.open(2, PROMPT + [1] * 9, identity=Identity(cache_salt="x"))
    assert np.array_equal(before, opened.plan.groups[0].block_ids)
    reopened_ids = np.array(reopened.plan.groups[0].block_ids)
    driver.decode(2, 5)
    assert np.array_equal(reopened_ids, reopened.plan.groups[0].block_ids)
