"""Behaviours of vLLM's block manager that no rule's test shows; docs/behaviours.md has them all."""

from prefixd.controller.core.messages import (
    CloseReason,
    Identity,
    OpenOutcome,
    PrefixMatch,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    open_entry,
)

PROMPT = list(range(100, 113))


def test_b03_equal_tokens_at_another_place_are_another_block() -> None:
    """Content includes everything before it; so do digests."""
    driver = Driver(block_count=20)
    driver.open(1, [1, 2, 3, 4] * 3 + [9])
    driver.step()
    digests = driver.published()
    assert len(set(digests.values())) == 3
    assert driver.match([5, 5, 5, 5, 1, 2, 3, 4, 9]) == PrefixMatch(0, 0)


def test_b10_decoded_blocks_have_the_digests_of_an_equal_prompt() -> None:
    """Whether a token was in the prompt or was sampled leaves no trace in a digest."""
    decoded = Driver()
    decoded.open(1, PROMPT[:5], identity=Identity(cache_salt="x"))
    for token_id in PROMPT[5:]:
        decoded.decode(1, token_id)
    decoded.step()
    prompted = Driver()
    prompted.open(1, PROMPT, identity=Identity(cache_salt="x"))
    prompted.step()
    assert len(prompted.published()) == 3
    assert list(decoded.published().values()) == list(prompted.published().values())


def test_b18_without_caching_the_last_released_block_is_taken_first() -> None:
    """Nothing is worth keeping, so released blocks come before those never used."""
    driver = Driver(caching_disabled=True)
    driver.open(1, PROMPT)
    driver.close(1)
    assert driver.free_order() == [4, 3, 2, 1, 5, 6, 7, 8, 9, 10]


def test_b24_decode_takes_a_block_only_where_a_slot_is_missing() -> None:
    """A block enters the index with the step that schedules its last token."""
    driver = Driver()
    driver.open(1, PROMPT[:6])
    assert [driver.decode(1, token_id) for token_id in (7, 8, 9)] == [0, 0, 3]
    driver.step()
    assert sorted(driver.published()) == [1, 2]
    for token_id in (1, 2):
        driver.decode(1, token_id)
    assert driver.pending() == []
    driver.decode(1, 3)
    assert driver.pending() == [3]


def test_b25_a_token_that_is_never_scheduled_completes_no_block() -> None:
    """The last sampled token is known, but its KV is not computed."""
    driver = Driver()
    driver.open(1, PROMPT[:7])
    driver.extend(1, PROMPT[7:8], schedule_token_count_max=0)
    assert driver.sequence(1).known_count == 8
    driver.close(1)
    driver.step()
    assert driver.match(PROMPT) == PrefixMatch(4, 0)


def test_b26_a_chunk_takes_and_publishes_its_own_blocks_alone() -> None:
    """The rest of the prompt is known and cannot be matched before it is scheduled."""
    driver = Driver()
    opened = driver.open(1, PROMPT, schedule_token_count_max=6)
    assert opened.plan.scheduled.end_token == 6
    assert driver.table(1) == [1, 2]
    driver.step()
    assert driver.match(PROMPT) == PrefixMatch(4, 0)
    driver.extend(1, [])
    driver.step()
    assert driver.match(PROMPT) == PrefixMatch(12, 0)


def test_b28_blocks_of_rejected_drafts_stay_for_later_tokens() -> None:
    """A step that needs less frees nothing; the next ones take nothing."""
    driver = Driver()
    driver.open(1, PROMPT[:4])
    driver.extend(1, [], draft_token_count=6)
    assert driver.table(1) == [1, 2, 3]
    driver.extend(1, [50], rollback_to_token_count=4)
    assert driver.table(1) == [1, 2, 3]
    assert [driver.decode(1, token_id) for token_id in range(7)] == [0] * 7
    assert driver.decode(1, 7) == 4


def test_b36_closing_a_sequence_without_blocks_changes_no_block() -> None:
    """It was opened and never scheduled."""
    driver = Driver()
    before = driver.blocks(), driver.free_order()
    driver.open(1, PROMPT, schedule_token_count_max=0)
    assert driver.table(1) == []
    driver.close(1)
    assert (driver.blocks(), driver.free_order()) == before


def test_b37_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """Generated tokens included; it counts as a preempted one."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT[:6])
    for token_id in PROMPT[6:]:
        driver.decode(1, token_id)
    table = driver.table(1)
    driver.close(1, CloseReason.PREEMPTED)
    opened = driver.open(2, PROMPT, sequence_id="s1", preemption_count=1)
    assert opened.published_token_count == 12
    assert driver.table(2)[:3] == table[:3]
    statistics = driver.pool.state.statistics
    assert (statistics.sequence_count, statistics.preempted_sequence_count) == (1, 1)
    assert statistics.preempted_hit_token_count == 12


def test_b47_an_open_may_ask_for_nothing_but_its_match() -> None:
    """It holds what it found; where nothing was found it holds nothing, and that is no error."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    found = driver.outcome(open_entry(2, PROMPT, schedule_token_count_max=0))
    missed = driver.outcome(open_entry(3, [50] * 9, schedule_token_count_max=0))
    assert isinstance(found, OpenOutcome)
    assert isinstance(missed, OpenOutcome)
    assert (driver.table(2), driver.table(3)) == ([1, 2, 3], [])
