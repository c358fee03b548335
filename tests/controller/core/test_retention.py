"""The policy `retention` (S20): what hints change in the order, and how long."""

import pytest

from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    GroupKind,
    GroupSpec,
    Handle,
)
from prefixd.controller.core.policies.retention import EXPECTED_MS_DEFAULT
from tests.controller.core.driver import Driver, open_entry

OVER = RetentionHint(Continuation.OVER)
EXPECTED = RetentionHint(Continuation.EXPECTED)


def pool(**spec: object) -> Driver:
    """Makes a pool with blocks of four tokens."""
    return Driver(eviction_policy="retention", **spec)


def close(
    driver: Driver,
    handle: int,
    hint: RetentionHint | None = None,
    reason: CloseReason = CloseReason.FINISHED,
) -> None:
    """Closes a sequence."""
    driver.step(CloseEntry(Handle(handle), reason, hint))


def answer(driver: Driver, handle: int, token_ids: list[int], hint: RetentionHint | None) -> None:
    """Opens and closes a sequence, in two steps."""
    driver.open(handle, token_ids)
    close(driver, handle, hint)


def evictable(driver: Driver) -> list[int]:
    """Names the evictable blocks in the order in which they go."""
    published = driver.published()
    return [block_id for block_id in driver.free_order() if block_id in published]


def test_s20_the_order_is_over_then_unhinted_then_expected_then_priority() -> None:
    """Whatever was used last; without differences the least recently used goes first."""
    driver = pool(block_count=20)
    hints = (RetentionHint(priority=1), EXPECTED, None, OVER, None, OVER)
    for handle, hint in enumerate(hints, start=1):
        answer(driver, handle, [handle] * 5, hint)
    assert evictable(driver) == [4, 6, 3, 5, 2, 1]


def test_s20_a_close_says_what_holds_and_an_open_what_holds_without_it() -> None:
    """The open's hint stands until a close says otherwise; a fork inherits it."""
    driver = pool(block_count=20)
    driver.open(1, [1] * 5, retention_hint=OVER)
    driver.open(2, [2] * 5, retention_hint=OVER)
    driver.open(3, [3] * 5)
    close(driver, 1)
    close(driver, 2, EXPECTED)
    close(driver, 3)
    assert evictable(driver) == [1, 5, 3]


def test_s20_s19_a_shared_prefix_has_the_best_claim_of_what_is_behind_it() -> None:
    """One conversation is over, the other goes on: the tail of the first alone goes early."""
    driver = pool(block_count=20)
    shared = [9] * 4
    answer(driver, 1, [*shared, 1, 1, 1, 1, 1], EXPECTED)
    answer(driver, 2, [*shared, 2, 2, 2, 2, 2], OVER)
    answer(driver, 3, [3] * 5, None)
    assert evictable(driver) == [3, 4, 2, 1]


def test_s20_a_prefix_that_sequences_parted_from_is_no_ones_tail() -> None:
    """All that used it are over: it counts as without a hint, and what was used before it goes."""
    driver = pool(block_count=20)
    shared = [9] * 4
    answer(driver, 1, [3] * 5, None)
    answer(driver, 2, [*shared, 1, 1, 1, 1, 1], OVER)
    answer(driver, 3, [*shared, 2, 2, 2, 2, 2], OVER)
    order = evictable(driver)
    assert order[-1] == order[-2] + 1 == 2
    assert order[-2] == 1


def test_s20_the_last_turn_of_a_conversation_decides_for_all_of_it() -> None:
    """The next turn answers the expectation of the one before."""
    driver = pool(block_count=20)
    answer(driver, 1, [1] * 5, EXPECTED)
    answer(driver, 2, [5] * 5, None)
    assert evictable(driver) == [2, 1]
    answer(driver, 3, [1] * 9, OVER)
    assert evictable(driver)[-1] == 2
    assert len(evictable(driver)) == 3


def test_s20_s13_what_is_left_of_a_claimed_sequence_keeps_its_claim() -> None:
    """Its tail was taken; the rest is still expected to be used."""
    driver = pool(block_count=5)
    answer(driver, 1, [1] * 13, EXPECTED)
    driver.open(2, [2] * 8)
    close(driver, 2)
    assert driver.match([1] * 13).published_token_count == 8
    driver.open(3, [3] * 8)
    assert driver.match([1] * 13).published_token_count == 8


@pytest.mark.parametrize("duration_ms", [0, 500])
def test_s20_an_expected_turn_is_waited_for_no_longer_than_said(duration_ms: int) -> None:
    """Without a duration for half an hour; then it counts as without a hint, used just now."""
    driver = pool(block_count=20)
    end_ms = duration_ms or EXPECTED_MS_DEFAULT
    answer(driver, 1, [1] * 9, RetentionHint(Continuation.EXPECTED, duration_ms=duration_ms))
    answer(driver, 2, [2] * 5, None)
    driver.now_ms = end_ms - 1
    driver.step()
    assert evictable(driver) == [3, 2, 1]
    driver.now_ms = end_ms
    driver.step()
    answer(driver, 3, [3] * 5, None)
    assert evictable(driver) == [3, 2, 1, 4]


def test_s20_a_priority_with_a_duration_outlives_use() -> None:
    """One without it is answered by the next sequence that goes on behind the blocks."""
    driver = pool(block_count=20)
    answer(driver, 1, [1] * 5, RetentionHint(priority=1))
    answer(driver, 2, [2] * 5, RetentionHint(priority=1, duration_ms=100))
    answer(driver, 3, [1] * 5, OVER)
    answer(driver, 4, [2] * 5, OVER)
    answer(driver, 5, [5] * 5, None)
    assert evictable(driver)[-1] == 2
    driver.now_ms = 100
    driver.step()
    answer(driver, 6, [6] * 5, None)
    assert evictable(driver).index(2) < len(evictable(driver)) - 1


def test_s20_s23_window_blocks_are_claimed_with_their_sequence() -> None:
    """Blocks of every group: each by the best claim of those that held it, and until it ends."""
    groups = (GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, window_token_count=9))
    driver = pool(block_count=30, groups=groups)
    hints = (RetentionHint(Continuation.EXPECTED, duration_ms=50), None, OVER)
    for handle, hint in enumerate(hints, start=1):
        answer(driver, handle, [handle] * 9, hint)
    held_by = {
        handle: {block_id for run in runs for block_id in run}
        for handle, runs in ((1, ((1, 2), (4, 5))), (2, ((3, 6), (8, 9))), (3, ((7, 10), (12, 13))))
    }
    order = evictable(driver)
    assert [set(order[at : at + 4]) for at in (0, 4, 8)] == [held_by[3], held_by[2], held_by[1]]
    driver.now_ms = 50
    driver.step()
    answer(driver, 4, [4] * 9, None)
    assert set(evictable(driver)[8:12]) == held_by[1]


def test_s20_a_preempted_sequence_is_expected_back() -> None:
    """Even where its client said that the conversation is over."""
    driver = pool(block_count=20)
    driver.open(1, [1] * 5, retention_hint=OVER)
    close(driver, 1, reason=CloseReason.PREEMPTED)
    answer(driver, 2, [2] * 5, None)
    assert evictable(driver) == [2, 1]


def test_s20_hints_cost_no_block_and_hide_none() -> None:
    """Whatever is claimed can be taken: a full pool gives all of it to a new sequence."""
    driver = pool(block_count=9)
    for handle in (1, 2):
        answer(driver, handle, [handle] * 13, RetentionHint(priority=7, duration_ms=10_000))
    assert driver.step(open_entry(3, [3] * 32)).available_block_count == 0


def test_s20_claims_that_are_gone_are_forgotten() -> None:
    """A conversation of many turns leaves one claim, not one for each turn."""
    driver = pool(block_count=20)
    for turn in range(1, 400):
        answer(driver, turn, [1] * 5, EXPECTED)
    claims = driver.pool.state.claims
    assert claims.waiting_count < 100


def test_s20_claims_of_window_blocks_that_are_gone_are_forgotten() -> None:
    """Evicted blocks leave nothing that waits for the end of what was claimed for them."""
    windows = (GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, 8))
    driver = pool(block_count=9, groups=windows)
    for handle in range(1, 200):
        answer(driver, handle, [handle] * 5, EXPECTED)
    assert driver.pool.state.claims.waiting_count < 100


def test_s20_a_flush_forgets_how_many_claims_were_to_end() -> None:
    """What is claimed afterwards is swept out as in a pool that is new."""
    driver = pool(block_count=301)
    for handle in range(1, 301):
        answer(driver, handle, [handle] * 5, EXPECTED)
    driver.step()
    driver.pool.flush()
    assert driver.pool.state.claims.waiting_count == 0
    for turn in range(301, 601):
        answer(driver, turn, [1] * 5, EXPECTED)
    assert driver.pool.state.claims.waiting_count < 100


def test_s20_what_is_left_of_a_shared_prefix_is_shared() -> None:
    """The block where sequences parted was taken: the one before it is still no one's tail."""
    driver = pool(block_count=8)
    shared = [9] * 4 + [8] * 4
    driver.open(1, [*shared[:4], 7])
    for handle in (2, 3):
        driver.open(handle, [*shared, handle, handle, handle, handle, 5])
    for handle in (2, 3, 1):
        close(driver, handle, OVER)
    driver.step()
    driver.open(4, [6] * 24)
    assert driver.match([*shared, 1]).published_token_count == 4
    close(driver, 4, OVER)
    driver.step()
    assert evictable(driver)[-1] == 1


def test_s20_a_claim_stays_where_it_was_made() -> None:
    """What goes on behind it and is released together with it claims nothing for it."""
    driver = pool(block_count=20)
    pinned = RetentionHint(priority=1, duration_ms=1_000)
    answer(driver, 1, [1] * 5, pinned)
    answer(driver, 2, [1] * 4 + [2] * 5, RetentionHint(priority=1))
    answer(driver, 3, [1] * 4 + [2] * 9, OVER)
    answer(driver, 4, [4] * 5, None)
    assert evictable(driver)[-1] == 1
    assert evictable(driver) == [3, 2, 4, 1]


def test_s20_what_a_failed_step_takes_back_was_claimed_for_what_stays() -> None:
    """The claim of a sequence whose last blocks were never written stands at its written ones."""
    driver = pool(block_count=20)
    driver.open(1, [1] * 5)
    driver.step()
    executed = driver.pool.applied_step_id
    shared = [1] * 4 + [2] * 4
    opens = [open_entry(handle, [*shared, *[handle] * 9]) for handle in (2, 3)]
    driver.step(*opens, executed=executed)
    driver.step(
        CloseEntry(Handle(2), CloseReason.FINISHED, RetentionHint(priority=1)),
        CloseEntry(Handle(3), CloseReason.FINISHED, OVER),
        executed=executed,
    )
    driver.step(executed=executed, failed=(executed + 1, executed + 2))
    close(driver, 1, OVER)
    answer(driver, 4, [4] * 5, None)
    assert evictable(driver)[-1] == 1
    assert len(evictable(driver)) == 2
