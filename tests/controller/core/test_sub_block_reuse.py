"""Matches that end inside a block: the pool option `sub_block_reuse` (S6, S7, S10, S12, S22)."""

from typing import Any

from prefixd.controller.core import inspect
from prefixd.controller.core.messages import (
    AwaitPrefix,
    Identity,
    MultimodalItem,
    OpenOutcome,
    PrefixMatch,
    Refusal,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    extend_entry,
    new_block_ids,
    open_entry,
    slots,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
CAT = Identity(multimodal_items=(MultimodalItem("cat", 4, 2),))
DOG = Identity(multimodal_items=(MultimodalItem("dog", 4, 2),))


def driver_of(**spec: Any) -> Driver:
    """Returns the driver of a pool with the option."""
    return Driver(sub_block_reuse=True, **spec)


def copied(outcome: object) -> tuple[int, ...]:
    """Returns the one copy of an open: source, target, tokens, index in the table."""
    assert isinstance(outcome, OpenOutcome), outcome
    (copy,) = outcome.plan.copies
    return (copy.source_block_id, copy.target_block_id, copy.token_count, copy.block_index)


def test_s6_a_match_ends_at_the_first_different_token() -> None:
    """Six of seven tokens are cached: one block shared, two tokens copied, one computed."""
    driver = driver_of()
    driver.open(1, PROMPT)
    outcome = driver.open(2, [1, 2, 3, 4, 5, 6, 50])
    assert copied(outcome) == (2, 3, 2, 1)
    assert new_block_ids(outcome) == [1, 3]
    assert slots(outcome) == [14]
    assert (outcome.plan.cached.end_token, outcome.plan.scheduled.end_token) == (6, 7)
    assert (outcome.published_token_count, outcome.pending_token_count) == (6, 0)
    assert driver.sequence(2).cached_count == 6
    statistics = inspect.pool_view(driver.pool).statistics
    assert statistics.hit_token_count == 6


def test_s6_without_the_option_whole_blocks_alone_match() -> None:
    """The default is off."""
    driver = Driver()
    driver.open(1, PROMPT)
    outcome = driver.open(2, [1, 2, 3, 4, 5, 6, 50])
    assert outcome.plan.copies == ()
    assert outcome.plan.cached.end_token == 4


def test_s7_the_last_token_is_computed_even_where_the_block_has_it() -> None:
    """An equal prompt of two blocks copies three of the second block's tokens."""
    driver = driver_of()
    driver.open(1, PROMPT)
    assert copied(driver.open(2, PROMPT)) == (2, 3, 3, 1)


def test_the_longest_of_several_branches_is_copied() -> None:
    """The oldest of equal ones."""
    driver = driver_of(block_count=20)
    for handle, prompt in enumerate([[1, 2, 9, 9], [1, 2, 3, 9], [1, 2, 3, 8]], start=1):
        driver.open(handle, [*prompt, 5])
    assert copied(driver.open(4, [1, 2, 3, 7, 5])) == (driver.table(2)[0], 7, 3, 0)


def test_s8_asking_for_a_partial_match_changes_nothing() -> None:
    """MatchPrefix counts tokens inside blocks too."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.close(1)
    before = driver.seen()
    assert driver.match([1, 2, 3, 4, 5, 50]) == PrefixMatch(5, 0)
    assert driver.match([1, 50]) == PrefixMatch(1, 0)
    assert driver.match([1]) == PrefixMatch(0, 0)
    assert driver.seen() == before


def test_s9_a_sequence_that_skips_the_cache_copies_nothing() -> None:
    """It reads nothing."""
    driver = driver_of()
    driver.open(1, PROMPT)
    assert driver.open(2, PROMPT, skip_cache_read=True).plan.copies == ()


def test_s3_other_extra_keys_of_the_block_match_nothing_of_it() -> None:
    """Equal placeholders of different images: the block's keys decide, as for a whole one."""
    driver = driver_of()
    driver.open(1, [*PROMPT, 9], identity=CAT)
    driver.step()
    assert driver.match(PROMPT, identity=CAT) == PrefixMatch(7, 0)
    assert driver.match(PROMPT, identity=DOG) == PrefixMatch(4, 0)
    assert driver.match(PROMPT, identity=Identity(cache_salt="x")) == PrefixMatch(0, 0)


def test_s10_a_partial_match_counts_only_what_an_earlier_step_scheduled() -> None:
    """A prompt of the same step computes its last block; the next step copies a pending one."""
    driver = driver_of(block_count=20)
    outcomes = driver.step(open_entry(1, PROMPT), open_entry(2, [1, 2, 3, 4, 5, 6, 50])).outcomes
    assert isinstance(outcomes[1], OpenOutcome)
    assert outcomes[1].plan.copies == ()
    assert outcomes[1].pending_token_count == 4
    (third,) = driver.step(open_entry(3, [1, 2, 3, 4, 5, 6, 60]), executed=0).outcomes
    assert copied(third) == (2, 4, 2, 1)
    assert isinstance(third, OpenOutcome)
    assert (third.published_token_count, third.pending_token_count) == (0, 6)
    assert driver.sequence(3).written_count == 0
    driver.step()
    assert driver.sequence(3).written_count == 7


def test_s10_an_open_awaits_tokens_inside_blocks() -> None:
    """It waits for a sequence that prefills, and for one that this step computes."""
    driver = driver_of(block_count=20)
    outcomes = driver.step(
        open_entry(1, PROMPT), open_entry(2, PROMPT, await_token_count_min=3)
    ).outcomes
    assert outcomes[1] == AwaitPrefix(0, 4, 3, 1)
    (outcome,) = driver.step(open_entry(2, PROMPT, await_token_count_min=3)).outcomes
    assert isinstance(outcome, OpenOutcome)
    assert outcome.plan.scheduled.end_token - outcome.plan.scheduled.start_token == 1


def test_sixteen_equal_cold_prompts_compute_one_and_fifteen_tokens() -> None:
    """All but the first wait one step and compute their last token alone."""
    driver = driver_of(block_count=300, block_size=16)
    prompt = [token % 50 for token in range(1_024)]
    waiting = list(range(1, 17))
    computed_count = 0
    while waiting:
        entries = [open_entry(one, prompt, await_token_count_min=2) for one in waiting]
        for handle, outcome in zip(list(waiting), driver.step(*entries).outcomes, strict=True):
            if isinstance(outcome, OpenOutcome):
                waiting.remove(handle)
                scheduled = outcome.plan.scheduled
                computed_count += scheduled.end_token - scheduled.start_token
    assert computed_count == 1_024 + 15


def test_s12_a_source_that_nobody_holds_is_not_evicted_for_its_own_copy() -> None:
    """It counts against the supply; where the pool is too small, no copy is made."""
    driver = driver_of(block_count=4)
    driver.open(1, PROMPT)
    driver.close(1)
    assert driver.free_order() == [3, 2, 1]
    outcome = driver.open(2, [1, 2, 3, 4, 5, 6, 50])
    assert copied(outcome) == (2, 3, 2, 1)
    driver.close(2)
    outcome = driver.open(3, [1, 2, 3, 4, 5, 6, 50, 51, 52])
    assert outcome.plan.copies == ()
    assert outcome.plan.cached.end_token == 4
    assert len(driver.table(3)) == 3


def test_s18_a_partial_hit_refreshes_its_source() -> None:
    """An idle source goes to the end of the free order."""
    driver = driver_of(block_count=6)
    driver.open(1, PROMPT[:4])
    driver.close(1)
    driver.open(2, [70, 71, 72, 73])
    driver.close(2)
    assert driver.free_order()[-2:] == [1, 2]
    driver.open(3, [1, 2, 50])
    assert driver.free_order()[-2:] == [2, 1]


def test_s22_a_source_is_not_handed_out_in_the_step_that_copies_it() -> None:
    """Neither idle nor given back by its holder in the same step."""
    driver = driver_of(block_count=6)
    driver.open(1, PROMPT[:4])
    outcomes = driver.step(
        open_entry(2, [1, 2, 50]), close_entry(1), open_entry(3, [80] * 13)
    ).outcomes
    assert copied(outcomes[0]) == (1, 2, 2, 0)
    assert isinstance(outcomes[2], Refusal)
    assert dict(outcomes[2].numbers) == {"needed_count": 4, "available_count": 3}
    driver.open(3, [80] * 13)


def test_a_cut_sequence_copies_what_it_lost_inside_a_block() -> None:
    """Its extend matches as an open does, to the token."""
    driver = driver_of(block_count=20)
    driver.open(1, [*PROMPT, 9])
    driver.step(open_entry(2, [1, 2, 3, 4, 5, 6, 50]))
    driver.step(failed=(2, 2), executed=1)
    outcome = driver.extend(2, [])
    (copy,) = outcome.plan.copies
    assert (copy.source_block_id, copy.token_count, copy.block_index) == (2, 2, 1)
    assert (outcome.plan.cached.start_token, outcome.plan.cached.end_token) == (4, 6)


def test_a_copied_block_completes_and_is_published_with_its_own_content() -> None:
    """The target is a block like any other behind its step."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, [1, 2, 3, 4, 5, 6, 50, 51, 52])
    driver.step()
    assert driver.match([1, 2, 3, 4, 5, 6, 50, 51, 99]) == PrefixMatch(8, 0)
    driver.step(close_entry(1), close_entry(2))
    driver.step()
    assert len(driver.published()) == 3
    assert sorted(driver.free_order()) == list(range(1, 11))


def test_an_extend_of_a_sequence_that_is_not_cut_matches_nothing() -> None:
    """Tokens that come later are computed, whatever is cached."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, [1, 2])
    outcome = driver.outcome(extend_entry(2, [3, 4], known=2, scheduled=2))
    assert not isinstance(outcome, Refusal)
    assert driver.sequence(2).cached_count == 1
