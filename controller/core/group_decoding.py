"""Decode entries of pools with window groups: row by row, a new block in each group (rule S23)."""

import numpy as np

from prefixd.controller.core import limits
from prefixd.controller.core.completion import complete_blocks
from prefixd.controller.core.copying import copy_tail, note_tail, shared_tail
from prefixd.controller.core.decoding import check_position, deferred_row
from prefixd.controller.core.errors import (
    CacheError,
    LimitExceeded,
    SequenceNotFound,
    TokenBudgetSpent,
)
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import (
    BlockCopy,
    DecodeEntry,
    DecodeOutcome,
    DeferredRow,
    FreedBlock,
    Handle,
    IntArray,
)
from prefixd.controller.core.scheduling import check_supply, window_span
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState, StepContext
from prefixd.controller.core.window_plans import copy_window_tails, exchange_windows, left_behind


def decode_groups(state: PoolState, step: StepContext, entry: DecodeEntry) -> DecodeOutcome:
    """Schedule one position per row; a row that cannot be is deferred and changes nothing."""
    row_count = len(entry.handles)
    token_ends = np.cumsum(entry.token_counts)
    columns: tuple[IntArray, ...] = tuple(
        np.zeros(row_count, dtype=np.int64) for _ in state.spec.groups
    )
    copies: list[BlockCopy] = []
    freed: list[FreedBlock] = []
    deferred: list[DeferredRow] = []
    for index in range(row_count):
        try:
            sequence = _checked_sequence(state, step, entry, index)
            new_block_ids = _make_room(state, step, sequence, copies, freed)
        except CacheError as error:
            deferred.append(deferred_row(index, error))
            continue
        for column, block_id in zip(columns, new_block_ids, strict=False):
            column[index] = block_id
        token_end = int(token_ends[index])
        token_ids = entry.token_ids[token_end - int(entry.token_counts[index]) : token_end]
        state.columns.add_tokens(sequence, token_ids)
        state.columns.scheduled[sequence.row] += 1
        state.columns.planned_step_id[sequence.row] = step.step_id
        step.spend(1)
        complete_blocks(state, sequence, step.step_id)
        note_tail(state, sequence)
    return DecodeOutcome(columns, tuple(deferred), tuple(copies), tuple(freed))


def _checked_sequence(
    state: PoolState, step: StepContext, entry: DecodeEntry, index: int
) -> Sequence:
    handle = Handle(int(entry.handles[index]))
    sequence = state.sequences.get(handle)
    if sequence is None:
        raise SequenceNotFound(f"no open sequence has handle {handle}")
    check_position(state, entry, index, sequence.row)
    known_count = int(state.columns.known[sequence.row]) + int(entry.token_counts[index])
    end_count = max(int(state.columns.scheduled[sequence.row]) + 1, known_count)
    if end_count > limits.TOKENS_PER_SEQUENCE_MAX:
        raise LimitExceeded(f"the sequence would have {end_count} tokens")
    if step.budget_left == 0:
        raise TokenBudgetSpent("the step's token budget is used up")
    return sequence


def _make_room(
    state: PoolState,
    step: StepContext,
    sequence: Sequence,
    copies: list[BlockCopy],
    freed: list[FreedBlock],
) -> list[int]:
    """Free the blocks behind the windows, then get what the next position needs: a block in each
    group, a copy in each, or nothing. Returns the new blocks."""
    columns = state.columns
    row = sequence.row
    position = int(columns.scheduled[row])
    tail = shared_tail(state, sequence, position=position)
    if tail is not None:
        tail.check_ready()
    needs_blocks = tail is None and position >= columns.capacity[row]
    table_count = sequence.block_count
    end_block = table_count + needs_blocks
    nothing = Match(start_block=table_count)
    left = left_behind(state, sequence, position=position, step_id=step.step_id)
    needed_count = 0 if tail is None and not needs_blocks else len(state.spec.groups)
    if needed_count:
        check_supply(
            state,
            new_block_count=needed_count,
            total_block_count=end_block * (1 + len(state.windows.full_groups))
            + window_span(state, start=position, end_block=end_block),
            match=nothing,
            gain_count=left.gain_count,
        )
    exchange_windows(state, step, sequence, left, nothing)
    freed.extend(left.blocks)
    if tail is not None:
        own_block_id = state.supply.take_one(now_ms=step.now_ms)
        copies.append(copy_tail(state, step, sequence, tail, own_block_id))
        copies.extend(copy_window_tails(state, step, sequence, tail))
    if not needs_blocks:
        return []
    new_block_ids = state.supply.take(needed_count, now_ms=step.now_ms).tolist()
    sequence.private_block_ids.append(new_block_ids[0])
    for group_index, block_id in zip(state.windows.sizes, new_block_ids[1:], strict=True):
        state.windows.append(sequence, group_index, (block_id,))
    slot_count = sequence.block_count * state.spec.block_size
    columns.capacity[row] = min(slot_count, limits.TOKENS_PER_SEQUENCE_MAX)
    return new_block_ids
