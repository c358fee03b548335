"""Matches that end inside a block of pools with several KV groups (S6, S7, S10, S11, S22, S23)."""

from typing import Any

from prefixd.controller.core import inspect
from prefixd.controller.core.messages import (
    GroupKind,
    GroupSpec,
    OpenOutcome,
    PrefixMatch,
    Refusal,
)
from tests.controller.core.driver import Driver, close_entry, extend_entry, open_entry

PROMPT = list(range(1, 17))
LIKE = [*PROMPT[:14], 90, 91]
"""Its first 14 tokens are the prompt's: three blocks of four, and two tokens of the fourth."""


def driver_of(*sizes: int, **spec: Any) -> Driver:
    """Returns a pool of blocks of 4 with the option, and windows behind full attention."""
    windows = (GroupSpec(GroupKind.SLIDING_WINDOW, size) for size in sizes)
    spec = {"block_count": 41, "sub_block_reuse": True} | spec
    return Driver(groups=(GroupSpec(), *windows), **spec)


def copies(outcome: object) -> list[tuple[int, ...]]:
    """Returns the copies of an open: group, source, target, tokens, index in the table."""
    assert isinstance(outcome, OpenOutcome), outcome
    return [
        (
            one.group_index,
            one.source_block_id,
            one.target_block_id,
            one.token_count,
            one.block_index,
        )
        for one in outcome.plan.copies
    ]


def tables(driver: Driver, handle: int) -> list[list[int]]:
    """Returns the tables of a sequence, one per group."""
    found = inspect.block_tables(driver.pool, driver.name(handle))
    return [table.tolist() for table in found]


def test_s23_the_matched_part_of_the_next_block_is_copied_in_every_group() -> None:
    """From the block of its own place in each group, into the first new one."""
    driver = driver_of(4, 8)
    driver.open(1, PROMPT)
    driver.close(1)
    opened = driver.open(2, LIKE)
    assert copies(opened) == [(0, 4, 13, 2, 3), (1, 8, 14, 2, 3), (2, 12, 15, 2, 3)]
    assert (opened.plan.cached.end_token, opened.plan.scheduled.start_token) == (14, 14)
    assert [group.slots.first_slots.tolist() for group in opened.plan.groups] == [[54], [58], [62]]
    assert tables(driver, 2) == [[1, 2, 3, 13], [0, 0, 7, 14], [0, 10, 11, 15]]


def test_s23_a_window_of_one_token_gets_its_copy_too() -> None:
    """No query of such a group sees it, yet a block that is cached later has all its tokens."""
    driver = driver_of(1)
    driver.open(1, PROMPT)
    assert copies(driver.open(2, LIKE)) == [(0, 4, 9, 2, 3), (1, 8, 10, 2, 3)]


def test_s23_a_block_that_a_window_group_lacks_is_not_copied() -> None:
    """All groups agree on what matches, inside a block too."""
    driver = driver_of(4)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    assert driver.match(LIKE) == PrefixMatch(14, 0)
    driver.pool.evict_blocks(block_ids={8}, digests=frozenset())
    assert driver.match(LIKE) == PrefixMatch(12, 0)
    assert copies(driver.open(2, LIKE)) == []


def test_s23_a_lower_match_of_whole_blocks_still_ends_inside_the_next() -> None:
    """Without window block 2 all agree on two blocks; its place has nothing to copy either."""
    driver = driver_of(4)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.pool.evict_blocks(block_ids={7, 8}, digests=frozenset())
    assert driver.match(LIKE) == PrefixMatch(8, 0)
    assert driver.match([*PROMPT[:6], 70]) == PrefixMatch(6, 0)


def test_s7_the_last_token_is_computed_in_every_group() -> None:
    """An equal prompt copies three of its last block's tokens."""
    driver = driver_of(8)
    driver.open(1, PROMPT)
    assert copies(driver.open(2, PROMPT)) == [(0, 4, 9, 3, 3), (1, 8, 10, 3, 3)]


def test_s10_every_group_copies_only_what_an_earlier_step_scheduled() -> None:
    """In the step itself whole blocks alone match; the next one copies what is pending."""
    driver = driver_of(4)
    reply = driver.step(open_entry(1, PROMPT), open_entry(2, LIKE))
    assert copies(reply.outcomes[1]) == []
    reply = driver.step(open_entry(3, LIKE), executed=0)
    opened = reply.outcomes[0]
    assert [copy[3] for copy in copies(opened)] == [3, 3]
    assert isinstance(opened, OpenOutcome)
    assert (opened.published_token_count, opened.pending_token_count) == (0, 15)


def test_s10_a_window_block_that_this_step_computes_again_is_not_copied() -> None:
    """The full-attention block of its place was written long ago."""
    driver = driver_of(4)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.pool.evict_blocks(block_ids={8}, digests=frozenset())
    reply = driver.step(open_entry(2, [*PROMPT, 80]), open_entry(3, LIKE))
    assert copies(reply.outcomes[1]) == []
    assert [copy[3] for copy in copies(driver.open(4, LIKE))] == [3, 3]


def test_s11_a_copy_is_not_worth_a_refusal() -> None:
    """Where its sources are the blocks that are missing, whole blocks match alone."""
    driver = driver_of(4, block_count=11)
    driver.open(1, PROMPT)
    driver.close(1)
    opened = driver.open(2, [*LIKE, *range(70, 78)])
    assert copies(opened) == []
    assert opened.plan.cached.end_token == 12
    assert driver.free_order() == []


def test_s22_sources_are_not_handed_out_in_the_step_that_copies_them() -> None:
    """Idle ones of both groups are used last, and withheld until the step ends."""
    driver = driver_of(4, block_count=13)
    driver.open(1, PROMPT)
    driver.close(1)
    reply = driver.step(open_entry(2, LIKE), open_entry(3, [70, *PROMPT, *PROMPT]))
    assert copies(reply.outcomes[0]) == [(0, 4, 9, 2, 3), (1, 8, 10, 2, 3)]
    refusal = reply.outcomes[1]
    assert isinstance(refusal, Refusal)
    assert driver.free_order()[-2:] == [4, 8]


def test_a_cut_sequence_matches_inside_a_block_again() -> None:
    """What a failed step lost is copied, as for an open."""
    driver = driver_of(4)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.step(open_entry(2, LIKE, schedule_token_count_max=0))
    applied = driver.pool.applied_step_id
    driver.step(executed=applied - 1, failed=(applied, applied))
    view = driver.sequence(2)
    outcome = driver.outcome(
        extend_entry(2, [], known=view.known_count, scheduled=view.scheduled_count)
    )
    assert view.scheduled_count == 12
    assert [copy.group_index for copy in outcome.plan.copies] == [0, 1]
    assert outcome.plan.cached.end_token == 14


def test_s10_tokens_behind_a_pending_window_block_are_pending() -> None:
    """The window block in front of a published place was lost, and is being computed again."""
    driver = driver_of(8)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.pool.evict_blocks(block_ids={7}, digests=frozenset())
    driver.step(open_entry(2, [*PROMPT[:12], 80]))
    assert driver.match(LIKE) == PrefixMatch(8, 6)
    driver.step()
    assert driver.match(LIKE) == PrefixMatch(14, 0)
