"""The window groups' part of a plan (rule S23): blocks freed, matched, copied and appended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from prefixd.controller.core.copying import SharedTail
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import (
    BlockCopy,
    BlockId,
    FreedBlock,
    GroupPlan,
    SlotRuns,
    StepId,
)
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState, StepContext
from prefixd.controller.core.step_log import EXECUTED


@dataclass(frozen=True, slots=True)
class FreedWindow:
    """Blocks that an entry leaves behind, and how many of them it may have again itself."""

    blocks: tuple[FreedBlock, ...] = ()
    gain_count: int = 0


NOTHING_FREED = FreedWindow()
"""What an entry of a pool without window groups frees."""


def left_behind(
    state: PoolState, sequence: Sequence, *, position: int, step_id: StepId
) -> FreedWindow:
    """Find what a sequence needs no more once it goes on at a position; changes nothing.

    A rollback may lead back to the known count, so that counts where it is smaller (S14).
    """
    windows = state.windows
    if not windows.count:
        return NOTHING_FREED
    known_count = int(state.columns.known[sequence.row])
    blocks = windows.behind_window(sequence, position=min(position, known_count))
    return FreedWindow(tuple(blocks), windows.gain(sequence, blocks, step_id=step_id))


def exchange_windows(
    state: PoolState, step: StepContext, sequence: Sequence, freed: FreedWindow, match: Match
) -> None:
    """Free what is left behind, then hold what was matched."""
    state.windows.free_behind(
        sequence, list(freed.blocks), now_ms=step.now_ms, step_id=step.step_id
    )
    if match.block_count:
        state.windows.hold(sequence, match)


def note_pending(state: PoolState, row: int, match: Match) -> None:
    """Note by which step each position of a match is written in every group."""
    if not match.window_blocks:
        at = match.start_block
        for node in match.path:
            for run in node.lane.pending:
                end = (at + run.end) * state.spec.block_size
                state.log.note_matched(row, step_id=run.step_id, end=end)
            at += node.block_count
        return
    steps: list[StepId] = []
    for node in match.path:
        base = len(steps)
        steps += [EXECUTED] * node.lane.published_count
        for run in node.lane.pending:
            steps += [run.step_id] * (base + run.end - len(steps))
    for blocks in match.window_blocks.values():
        for at, block in blocks.items():
            if state.windows.index.is_pending(block):
                offset = at - match.start_block
                steps[offset] = max(steps[offset], block.step_id)
    latest = EXECUTED
    for at, step_id in enumerate(steps):
        latest = max(latest, step_id)
        if latest != EXECUTED:
            end = (match.start_block + at + 1) * state.spec.block_size
            state.log.note_matched(row, step_id=latest, end=end)


def copy_window_tails(
    state: PoolState, step: StepContext, sequence: Sequence, tail: SharedTail
) -> tuple[BlockCopy, ...]:
    """Copy the shared block of every window group, as the full-attention one is (S16)."""
    copies: list[BlockCopy] = []
    for group_index in state.windows.sizes:
        target_block_id = state.supply.take_one(now_ms=step.now_ms)
        source_block_id = state.windows.replace(
            sequence,
            group_index,
            tail.block_index,
            target_block_id,
            now_ms=step.now_ms,
            step_id=step.step_id,
            is_read=tail.is_read,
        )
        copies.append(
            BlockCopy(
                handle=sequence.handle,
                group_index=group_index,
                source_block_id=BlockId(source_block_id),
                target_block_id=BlockId(target_block_id),
                token_count=tail.token_count,
                block_index=tail.block_index,
            )
        )
    return tuple(copies)


def grow_windows(
    state: PoolState,
    step: StepContext,
    sequence: Sequence,
    *,
    new_block_count: int,
    start_block: int,
    slots: tuple[int, int],
) -> tuple[GroupPlan, ...]:
    """Append new blocks to every window table; `start_block` is where this entry's part begins,
    `slots` the positions [start, end) that need slots."""
    plans: list[GroupPlan] = []
    for group_index in state.windows.sizes:
        block_ids = state.supply.take(new_block_count, now_ms=step.now_ms)
        state.windows.append(sequence, group_index, block_ids)
        table = array("q", sequence.window_tables[group_index].block_ids())
        size = state.spec.block_size
        start, end = slots
        written = table[start // size : -(-end // size)]
        plans.append(
            GroupPlan(
                start_block=start_block,
                block_ids=np.array(table[start_block:], dtype=np.int64),
                slots=slot_runs(written, start=start, end=end, block_size=size),
            )
        )
    return tuple(plans)


def slot_runs(block_ids: array[int], *, start: int, end: int, block_size: int) -> SlotRuns:
    """Return the slots of positions [start, end), as runs of consecutive ones.

    `block_ids` are the blocks of these positions.
    """
    if start == end:
        return SlotRuns(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    offset = start % block_size
    if len(block_ids) == 1:
        first_slot = block_ids[0] * block_size + offset
        return SlotRuns(np.array((first_slot,)), np.array((end - start,)))
    ids = np.array(block_ids, dtype=np.int64)
    run_ends = np.append(np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1, len(ids))
    run_starts = np.empty_like(run_ends)
    run_starts[0] = 0
    run_starts[1:] = run_ends[:-1]
    first_slots = ids[run_starts] * block_size
    slot_counts = (run_ends - run_starts) * block_size
    first_slots[0] += offset
    slot_counts[0] -= offset
    slot_counts[-1] -= -end % block_size
    return SlotRuns(first_slots, slot_counts)
