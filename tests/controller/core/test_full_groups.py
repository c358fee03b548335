"""Further full-attention groups beside the first one (rules S11, S19, S23)."""

from typing import Any

from prefixd.controller.core import inspect
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.inspect import BlockState
from prefixd.controller.core.messages import DecodeOutcome, GroupKind, GroupSpec
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    fork_entry,
    open_entry,
)

PROMPT = list(range(1, 17))
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 4)


def driver_of(*groups: GroupSpec, **spec: Any) -> Driver:
    """Returns a pool of blocks of 4 with two groups of full attention, and others behind them."""
    return Driver(**({"block_count": 41, "groups": (GroupSpec(), GroupSpec(), *groups)} | spec))


def tables(driver: Driver, handle: int) -> list[list[int]]:
    """Returns the tables of a sequence, one per group."""
    found = inspect.block_tables(driver.pool, driver.name(handle))
    return [table.tolist() for table in found]


def cached(driver: Driver) -> None:
    """Computes and publishes the prompt, and lets its sequence go."""
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.step()


def test_s23_every_group_has_a_block_for_each_place() -> None:
    """Nothing is freed behind a window, and decode rows get a block in each group."""
    driver = driver_of()
    driver.open(1, PROMPT)
    outcome = driver.outcome(decode_entry(driver.row(1, 50)))
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.freed_blocks == ()
    assert [column.tolist() for column in outcome.new_block_ids] == [[9], [10]]
    assert tables(driver, 1) == [[1, 2, 3, 4, 9], [5, 6, 7, 8, 10]]


def test_s11_the_whole_prompt_is_reckoned_in_every_full_group() -> None:
    """A prompt that must fit needs all its blocks twice, and those of its chunk in the window."""
    entry = open_entry(1, PROMPT, schedule_token_count_max=4, must_fit_token_count=16)
    refusal = driver_of(WINDOW, block_count=9).refused(entry)
    assert refusal.reason == "SEQUENCE_EXCEEDS_POOL"
    assert refusal.numbers == (("available_count", 8), ("needed_count", 9))
    driver = driver_of(WINDOW, block_count=10)
    driver.step(entry)
    assert tables(driver, 1) == [[1], [2], [3]]


def test_s23_a_match_needs_the_blocks_of_every_full_group() -> None:
    """All groups agree on what is held from the sequence's begin on."""
    driver = driver_of(WINDOW)
    cached(driver)
    opened = driver.open(2, [*PROMPT, 99])
    assert opened.plan.cached.end_token == 16
    assert tables(driver, 2)[:2] == [[1, 2, 3, 4, 13], [5, 6, 7, 8, 14]]
    assert tables(driver, 2)[2][:4] == [0, 0, 0, 12]


def test_s10_pending_blocks_of_every_full_group_match() -> None:
    """Equal prompts of one step share them."""
    driver = driver_of()
    driver.step(open_entry(1, [*PROMPT, 90]), open_entry(2, [*PROMPT, 91]))
    assert [table[:4] for table in tables(driver, 1)] == [table[:4] for table in tables(driver, 2)]


def test_s19_a_named_block_of_any_full_group_is_dropped_with_its_place() -> None:
    """And with everything behind it, in every group."""
    driver = driver_of(WINDOW)
    cached(driver)
    assert driver.pool.evict_blocks(block_ids={7}, digests=frozenset()).block_count == 6
    assert set(driver.published()) == {1, 2, 5, 6, 9, 10}
    assert driver.match([*PROMPT, 99]).published_token_count == 8


def test_s19_an_evicted_block_of_a_further_full_group_takes_what_is_behind_it() -> None:
    """A sequence that was closed before its twins were written has left newer blocks behind older
    ones, which are taken first."""
    driver = driver_of(block_count=13)
    driver.open(1, PROMPT[:8])
    driver.close(1)
    driver.step(open_entry(2, PROMPT, skip_cache_read=True), close_entry(2))
    driver.step()
    assert set(driver.published()) == {1, 2, 3, 4, 7, 8, 11, 12}
    revision = driver.pool.revision
    driver.open(3, range(80, 90))
    assert tables(driver, 3)[1][1:] == [4, 3]
    assert set(driver.published()) == {1, 2, 7, 8}
    assert inspect.block(driver.pool, 12).state is BlockState.FREE
    events = driver.pool.events.after(revision, count_max=100)
    assert [getattr(event, "group_index", None) for event in events] == [1] * 4


def test_s16_a_fork_copies_its_partial_block_in_every_full_group() -> None:
    """The child has the whole tables of both."""
    driver = driver_of()
    driver.open(1, PROMPT[:6])
    driver.step(fork_entry(1, 2, 6))
    assert tables(driver, 2) == tables(driver, 1) == [[1, 2], [3, 4]]
    outcome = driver.outcome(decode_entry(driver.row(2, 50)))
    assert isinstance(outcome, DecodeOutcome)
    assert [(one.group_index, one.source_block_id) for one in outcome.copies] == [(0, 2), (1, 4)]


def test_a_failed_step_cuts_the_tables_of_every_full_group() -> None:
    """To their published run, which is the same in each."""
    driver = driver_of()
    driver.open(1, PROMPT, schedule_token_count_max=8)
    driver.extend(1, [])
    applied = driver.pool.applied_step_id
    driver.step(executed=applied - 1, failed=(applied, applied))
    assert tables(driver, 1) == [[1, 2], [3, 4]]


def test_the_first_group_is_one_of_full_attention_and_others_may_stand_anywhere() -> None:
    """Windows may stand between groups of full attention."""
    driver = Driver(block_count=41, groups=(GroupSpec(), WINDOW, GroupSpec()))
    driver.open(1, PROMPT)
    driver.decode(1, 50)
    assert [table.count(0) for table in tables(driver, 1)] == [0, 3, 0]


def test_s19_what_is_written_again_has_the_places_of_what_goes_with_a_parent() -> None:
    """A block goes with an idle parent, and a sequence that writes both again has both places, so
    that what it writes behind them is reachable."""
    driver = driver_of(block_count=21, eviction_policy="retention")
    driver.open(1, [0] * 8 + [9], retention_hint=RetentionHint(priority=7))
    driver.close(1)
    driver.open(2, [0] * 4 + [1], retention_hint=RetentionHint(Continuation.OVER))
    driver.close(2)
    again = open_entry(3, [0] * 12 + [5], skip_cache_read=True)
    driver.step(again, open_entry(4, list(range(1, 18))))
    driver.step()
    driver.close(3)
    assert driver.match([0] * 12 + [6]).published_token_count == 12


def test_s19_a_digest_names_what_a_further_group_has_behind_it_too() -> None:
    """The first group has lost the place already, so it does not say what stands behind it."""
    driver = driver_of(block_count=7)
    driver.open(1, PROMPT[:9])
    driver.step(close_entry(1))
    driver.step()
    first = driver.published()[1]
    driver.open(2, [50] * 8)
    assert [row.group_index for row in driver.blocks() if row.block_hash] == [1, 1]
    dropped = driver.pool.evict_blocks(block_ids=frozenset(), digests={first})
    assert (dropped.block_count, dropped.held_block_count) == (2, 0)
    driver.step(close_entry(2))
