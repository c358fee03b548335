"""What a call costs, in lines of Python that it runs: no more where more is cached that it is not
about. Counted and not timed, so that a busy machine changes nothing."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from prefixd.controller.core.claims import ENDS_PER_STEP_MAX
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    GroupKind,
    GroupSpec,
    Handle,
    Identity,
)
from tests.controller.core.driver import Driver, decode_entry, open_entry


def lines_run(call: Callable[[], Any]) -> int:
    """Counts the lines that a call runs, each turn of a comprehension included."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class QuickDriver(Driver):
    """A pool of window groups whose steps are not followed by a check of all invariants."""

    def __init__(self, *, block_count: int, windows: tuple[int, ...], **spec: Any) -> None:
        groups = (*(GroupSpec(GroupKind.SLIDING_WINDOW, window) for window in windows),)
        spec = {"groups": (GroupSpec(), *groups)} | spec
        super().__init__(block_count=block_count, **spec)

    def send(self, step: Any) -> Any:
        """Sends a step."""
        return self.pool.apply_step(step, now_ms=self.now_ms)


def cost_of_eviction(*, salt_count: int) -> int:
    """Fills a pool with prompts of as many tenants, and counts an open that evicts two of them."""
    driver = QuickDriver(block_count=1 + 2 * salt_count, windows=(8,))
    for handle in range(1, salt_count + 1):
        driver.open(handle, [1, 2, 3, 4], identity=Identity(cache_salt=f"tenant {handle}"))
        driver.close(handle)
    driver.step()
    identity = Identity(cache_salt="another")
    entry = open_entry(salt_count + 1, [1, 2, 3, 4, 5, 6, 7, 8], identity=identity)
    return lines_run(lambda: driver.outcome(entry))


def test_s13_evicting_window_blocks_costs_the_same_however_many_tenants_there_are() -> None:
    """A tenant's last block takes the tenant's root with it, and looks at no other root."""
    few, many = cost_of_eviction(salt_count=50), cost_of_eviction(salt_count=500)
    assert many <= few


def cost_of_a_miss_in_one_window(*, block_count: int) -> int:
    """Drops the blocks of one of two window groups, and counts what it costs to match nothing."""
    driver = QuickDriver(block_count=4 * block_count, windows=(4 * block_count, 2))
    prompt = list(range(4 * block_count + 1))
    driver.open(1, prompt)
    driver.step()
    views = driver.blocks()
    dropped = {view.block_id for view in views if view.group_index == 2 and view.block_hash}
    driver.pool.evict_blocks(block_ids=dropped, digests=frozenset())
    token_ids = np.array(prompt, np.uint32)
    assert driver.pool.match_prefix(token_ids, Identity()).published_token_count == 0
    return lines_run(lambda: driver.pool.match_prefix(token_ids, Identity()))


def test_s23_the_length_that_groups_agree_on_is_found_in_one_look_at_each_block() -> None:
    """A group with all of its blocks is not looked through again for each that another lacks."""
    short, long = (cost_of_a_miss_in_one_window(block_count=count) for count in (40, 160))
    assert long < 5 * short


def cost_of_leaving_twins(*, block_count: int) -> int:
    """Counts the close of a sequence whose blocks, at the end of a prompt, are twins."""
    driver = QuickDriver(block_count=4 * block_count + 40, windows=(160,))
    prompt = list(range(4 * block_count))
    for handle in (1, 2):
        driver.open(handle, prompt, skip_cache_read=True)
        driver.step()
        known = 4 * block_count
        driver.outcome(decode_entry((handle, known, known, [handle])))
        driver.step()
    assert driver.pool.state.windows.index.roots
    entry = CloseEntry(Handle(2), CloseReason.ABORTED)
    return lines_run(lambda: driver.outcome(entry))


def test_s15_leaving_twins_costs_the_same_for_each_wherever_it_stands() -> None:
    """A twin at the end of a long prompt is let go as fast as one at its beginning."""
    costs = [cost_of_leaving_twins(block_count=count) for count in (100, 200, 400)]
    assert costs[2] - costs[1] == 2 * (costs[1] - costs[0])


def cost_of_evicting_full_attention(*, block_count: int) -> int:
    """Counts an open that evicts all that two groups of full attention have of a prompt, while a
    sliding window still has its last block."""
    groups = (GroupSpec(), GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, 4))
    driver = QuickDriver(block_count=1 + 4 * block_count, windows=(), groups=groups)
    driver.open(1, list(range(4 * block_count)))
    driver.close(1)
    driver.step()
    entry = open_entry(2, [7] * (4 * block_count), schedule_token_count_max=4 * block_count - 4)
    return lines_run(lambda: driver.outcome(entry))


def test_s19_evicting_further_full_attention_costs_the_same_for_each_block() -> None:
    """A block takes what is cached behind it, and looks at no place where nothing of it is."""
    costs = [cost_of_evicting_full_attention(block_count=count) for count in (50, 100, 200)]
    assert costs[2] - costs[1] < 2.2 * (costs[1] - costs[0])


def claims_left_to_end(*, sequence_count: int) -> tuple[int, int]:
    """Closes as many sequences that are expected back, and lets time pass until none of them is:
    counts the next step's lines, and the claims that it left for later ones."""
    driver = QuickDriver(
        block_count=1 + 2 * sequence_count, windows=(4,), eviction_policy="retention"
    )
    hint = RetentionHint(Continuation.EXPECTED, duration_ms=1)
    for handle in range(1, sequence_count + 1):
        driver.open(handle, [handle, 2, 3, 4], retention_hint=hint)
        driver.close(handle)
    driver.now_ms += 1
    cost = lines_run(driver.step)
    return cost, driver.pool.state.claims.waiting_count


def test_s20_a_step_ends_no_more_claims_than_it_has_time_for() -> None:
    """Claims that end at once, in a pool that nobody used meanwhile, are ended by several steps."""
    few, few_left = claims_left_to_end(sequence_count=ENDS_PER_STEP_MAX)
    many, many_left = claims_left_to_end(sequence_count=2 * ENDS_PER_STEP_MAX)
    assert many <= few
    assert (few_left, many_left) == (ENDS_PER_STEP_MAX, 3 * ENDS_PER_STEP_MAX)


def test_s20_claims_that_a_step_left_are_ended_by_the_next_ones() -> None:
    """Afterwards no claim waits for its end, and all blocks are in the band without a claim."""
    driver = QuickDriver(block_count=1_001, windows=(), eviction_policy="retention")
    hint = RetentionHint(Continuation.EXPECTED, priority=7, duration_ms=1)
    for handle in range(1, 1_001):
        driver.open(handle, [handle, 2, 3, 4], retention_hint=hint)
        driver.close(handle)
    driver.now_ms += 1
    for _ in range(4):
        driver.step()
    assert driver.pool.state.claims.waiting_count == 0
    assert {band for _, band in driver.pool.state.order.bands()} == {1}
