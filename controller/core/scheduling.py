"""Giving a sequence blocks and scheduling positions: what opens and extends share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from prefixd.controller.core import limits
from prefixd.controller.core.copying import (
    SharedTail,
    copy_partial,
    copy_tail,
    keep_source,
)
from prefixd.controller.core.errors import (
    LimitExceeded,
    PoolExhausted,
    SequenceExceedsPool,
    TokenBudgetSpent,
)
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import (
    BlockCopy,
    GroupPlan,
    IntArray,
    SequencePlan,
    SlotRuns,
    TokenRange,
)
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState, StepContext
from prefixd.controller.core.window_plans import (
    NOTHING_FREED,
    FreedWindow,
    copy_window_tails,
    exchange_windows,
    grow_windows,
    left_behind,
    note_pending,
    slot_runs,
)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one open or extend asks for.

    Positions behind `start_token` and the match are to be scheduled up to `end_token`, at most
    `token_count_max` of them; the table has `table_block_count` blocks and gets the match's.
    `shared_tail` is the block that a write from `start_token` on would need in a copy. What
    `sequence`, None for an open, leaves behind its windows is freed.
    """

    start_token: int
    end_token: int
    token_count_max: int | None
    lookahead_slot_count: int
    must_fit_token_count: int
    table_block_count: int
    match: Match
    shared_tail: SharedTail | None = None
    sequence: Sequence | None = None


@dataclass(frozen=True, slots=True)
class Allotment:
    """What a demand was found to need; it fits, so that granting it cannot fail."""

    scheduled: TokenRange
    slot_end: int
    new_block_count: int
    match: Match
    shared_tail: SharedTail | None
    freed: FreedWindow


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def allot(state: PoolState, step: StepContext, demand: Demand) -> Allotment:
    """Find what a demand gets; changes nothing.

    Raises TokenBudgetSpent, LimitExceeded, CopyInSameStep, SequenceExceedsPool or PoolExhausted
    (S11).
    """
    try:
        return _allot(state, step, demand, demand.match)
    except PoolExhausted:
        partial = demand.match.partial
        if partial is None:
            raise
        # A copy is not worth a refusal: its source may be the very block that is missing.
        idle_count = demand.match.idle_count - partial.idle_count
        match = replace(demand.match, partial=None, idle_count=idle_count)
        return _allot(state, step, demand, match)


def _allot(state: PoolState, step: StepContext, demand: Demand, match: Match) -> Allotment:
    block_size = state.spec.block_size
    start = demand.start_token + match.token_count(block_size)
    count = max(0, demand.end_token - start)
    if demand.token_count_max is not None:
        count = min(count, demand.token_count_max)
    if step.budget_left is not None and count > step.budget_left:
        if step.budget_left == 0:
            raise TokenBudgetSpent("the step's token budget is used up")
        count = step.budget_left
    scheduled_end = start + count
    slot_end = scheduled_end + demand.lookahead_slot_count
    if slot_end > limits.TOKENS_PER_SEQUENCE_MAX:
        raise LimitExceeded(
            f"the sequence would have {slot_end} tokens with its lookahead, more than"
            f" {limits.TOKENS_PER_SEQUENCE_MAX}",
            numbers={
                "token_count": slot_end,
                "tokens_per_sequence_max": limits.TOKENS_PER_SEQUENCE_MAX,
            },
        )
    shared_tail = demand.shared_tail if slot_end > start else None
    if shared_tail is not None:
        shared_tail.check_ready()
    freed = NOTHING_FREED
    if demand.sequence is not None:
        freed = left_behind(state, demand.sequence, position=start, step_id=step.step_id)
    copy_count = 0 if shared_tail is None else 1 + state.windows.count
    table_count = demand.table_block_count + match.block_count
    checked_end = max(scheduled_end, demand.must_fit_token_count) + demand.lookahead_slot_count
    checked_count = ceil_div(checked_end, block_size)
    full_group_count = 1 + len(state.windows.full_groups)
    # Later chunks of a prompt reuse what falls behind a window, so only this one counts there.
    window_end = ceil_div(slot_end, block_size)
    window_group_count = len(state.spec.groups) - full_group_count
    window_count = max(0, window_end - table_count) * window_group_count
    check_supply(
        state,
        new_block_count=max(0, checked_count - table_count) * full_group_count
        + window_count
        + copy_count,
        total_block_count=checked_count * full_group_count
        + window_span(state, start=start, end_block=window_end),
        match=match,
        gain_count=freed.gain_count,
    )
    return Allotment(
        scheduled=TokenRange(start, scheduled_end),
        slot_end=slot_end,
        new_block_count=max(0, ceil_div(slot_end, block_size) - table_count),
        match=match,
        shared_tail=shared_tail,
        freed=freed,
    )


def window_span(state: PoolState, *, start: int, end_block: int) -> int:
    """Count the blocks that the tables of sliding windows have from the window before `start` up
    to an end."""
    windows = state.windows
    return sum(
        max(0, end_block - windows.first_needed(group_index, position=start))
        for group_index in windows.sizes
        if group_index not in windows.full_groups
    )


def check_supply(
    state: PoolState,
    *,
    new_block_count: int,
    total_block_count: int,
    match: Match,
    gain_count: int = 0,
) -> None:
    """Raise SequenceExceedsPool or PoolExhausted where blocks can never, or not now, be had."""
    usable_count = state.spec.block_count - 1
    if total_block_count > usable_count:
        raise SequenceExceedsPool(
            f"{total_block_count} blocks are needed, the pool has {usable_count}",
            numbers={"needed_count": total_block_count, "available_count": usable_count},
        )
    if not state.supply.suffices(new_block_count=new_block_count - gain_count, match=match):
        needed_count = new_block_count + match.idle_count
        available_count = state.supply.available_count + gain_count
        raise PoolExhausted(
            f"{needed_count} blocks are needed, {available_count} are free or evictable",
            numbers={"needed_count": needed_count, "available_count": available_count},
        )


def grant(
    state: PoolState, step: StepContext, sequence: Sequence, allotment: Allotment
) -> SequencePlan:
    """Give a sequence its matched and new blocks, schedule its positions and plan them.

    Its full blocks have yet to enter the index.
    """
    columns = state.columns
    row = sequence.row
    start_block = sequence.block_count
    cached_start = start_block * state.spec.block_size
    match = allotment.match
    state.index.hold(sequence, match)
    if state.windows.count:
        exchange_windows(state, step, sequence, allotment.freed, match)
    if match.published_count < match.block_count:
        note_pending(state, row, match)
    copies: tuple[BlockCopy, ...] = ()
    if allotment.shared_tail is not None:
        own_block_id = state.supply.take_one(now_ms=step.now_ms)
        tail = allotment.shared_tail
        copies = (
            copy_tail(state, step, sequence, tail, own_block_id),
            *copy_window_tails(state, step, sequence, tail),
        )
    source = None if match.partial is None else keep_source(state, step, match.partial)
    new_block_ids = state.supply.take(allotment.new_block_count, now_ms=step.now_ms)
    block_index = sequence.block_count
    sequence.private_block_ids.extend(new_block_ids)
    scheduled = allotment.scheduled
    window_plans = grow_windows(
        state,
        step,
        sequence,
        new_block_count=allotment.new_block_count,
        start_block=start_block,
        slots=(scheduled.start_token, allotment.slot_end),
    )
    if match.partial is not None and source is not None:
        copies = copy_partial(state, step, sequence, match.partial, source, block_index)
    slot_count = sequence.block_count * state.spec.block_size
    columns.capacity[row] = min(slot_count, limits.TOKENS_PER_SEQUENCE_MAX)
    columns.scheduled[row] = scheduled.end_token
    token_count = scheduled.end_token - scheduled.start_token
    if token_count:
        columns.planned_step_id[row] = step.step_id
        step.spend(token_count)
    return SequencePlan(
        handle=sequence.handle,
        cached=TokenRange(
            cached_start if match.token_count(state.spec.block_size) else scheduled.start_token,
            scheduled.start_token,
        ),
        scheduled=scheduled,
        groups=(
            GroupPlan(
                start_block=start_block,
                block_ids=_appended_block_ids(match, new_block_ids),
                slots=_slot_runs(state, sequence, scheduled.start_token, allotment.slot_end),
            ),
            *window_plans,
        ),
        copies=copies,
        freed_blocks=allotment.freed.blocks,
    )


def _appended_block_ids(match: Match, new_block_ids: array[int]) -> IntArray:
    block_ids: array[int] = array("q")
    for node in match.path:
        block_ids.extend(node.lane.block_ids)
    block_ids.extend(new_block_ids)
    return np.frombuffer(block_ids, dtype=np.int64)


def _slot_runs(state: PoolState, sequence: Sequence, start: int, end: int) -> SlotRuns:
    """Return the slots of positions [start, end), as runs of consecutive ones."""
    size = state.spec.block_size
    if start == end:
        return SlotRuns(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    first_block = start // size - sequence.indexed_count
    end_block = ceil_div(end, size) - sequence.indexed_count
    assert first_block >= 0, "scheduled positions lie behind the indexed blocks"
    return slot_runs(
        sequence.private_block_ids[first_block:end_block], start=start, end=end, block_size=size
    )
