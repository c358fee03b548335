"""Decode entries: one position of each of many sequences.

A regular row supplies at most one token, of a position that was scheduled before or is now, and
has a block or can get one. Where all rows of an entry are regular, none can be refused, so their
columns are changed all at once and the reply waits for nothing that goes row by row. Otherwise this
is done with the quiet rows, the regular ones that neither need nor complete a block: they touch
nothing that other rows see. The others go one by one, in order.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from prefixd.controller.core import limits
from prefixd.controller.core.completion import complete_blocks
from prefixd.controller.core.copying import copy_tail, note_tail, shared_tail
from prefixd.controller.core.errors import (
    CacheError,
    LimitExceeded,
    PositionMismatch,
    SequenceNotFound,
    TokenBudgetSpent,
)
from prefixd.controller.core.left_over import advance, catch_up
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import (
    BlockCopy,
    DecodeEntry,
    DecodeOutcome,
    DeferredRow,
    Handle,
    IntArray,
)
from prefixd.controller.core.scheduling import check_supply
from prefixd.controller.core.state import DecodedBatch, PoolState, StepContext


def decode(state: PoolState, step: StepContext, entry: DecodeEntry) -> DecodeOutcome:
    """Schedule one position per row; a row that cannot be is deferred and changes nothing."""
    row_count = len(entry.handles)
    one_by_one: IntArray = np.arange(row_count)
    if step.budget_left is None or step.budget_left >= row_count:
        rows, is_open = state.rows.rows_of(entry.handles)
        is_regular = is_open & _are_regular(state, entry, rows)
        if is_regular.all() and _have_blocks(state, entry, rows):
            return _decode_regular(state, step, entry, rows)
        is_quiet = is_regular & _are_quiet(state, entry, rows)
        quiet = np.flatnonzero(is_quiet)
        _decode_regular(state, step, _selected(entry, quiet), rows[quiet])
        catch_up(state)
        one_by_one = np.flatnonzero(~is_quiet)
    token_ends = np.cumsum(entry.token_counts)
    new_block_ids = np.zeros(row_count, dtype=np.int64)
    copies: list[BlockCopy] = []
    deferred: list[DeferredRow] = []
    for index in one_by_one.tolist():
        try:
            new_block = _apply_row(state, step, entry, index, int(token_ends[index]))
        except CacheError as error:
            deferred.append(deferred_row(index, error))
        else:
            if isinstance(new_block, BlockCopy):
                copies.append(new_block)
            else:
                new_block_ids[index] = new_block
    return DecodeOutcome((new_block_ids,), tuple(deferred), tuple(copies))


def deferred_row(index: int, error: CacheError) -> DeferredRow:
    """Return what says that a row was refused."""
    numbers = error.numbers
    return DeferredRow(
        index,
        error.reason,
        numbers.get("needed_count", 0),
        numbers.get("available_count", 0),
    )


def _are_regular(state: PoolState, entry: DecodeEntry, rows: IntArray) -> npt.NDArray[np.bool_]:
    """Tell which rows are regular, as far as their own columns show it."""
    columns = state.columns
    known = entry.known_count_before
    scheduled = entry.scheduled_count_before
    is_regular: npt.NDArray[np.bool_] = entry.token_counts <= 1
    is_regular &= columns.known[rows] == known
    is_regular &= columns.scheduled[rows] == scheduled
    if scheduled is not known:
        is_regular &= scheduled >= known
    is_regular &= ~(columns.cut[rows] | columns.shares_tail[rows])
    return is_regular


def _are_quiet(state: PoolState, entry: DecodeEntry, rows: IntArray) -> npt.NDArray[np.bool_]:
    """Tell which regular rows neither need nor complete a block."""
    completed_counts = entry.known_count_before + entry.token_counts
    completes = (entry.token_counts > 0) & (completed_counts % state.spec.block_size == 0)
    is_quiet: npt.NDArray[np.bool_] = entry.scheduled_count_before < state.columns.capacity[rows]
    is_quiet &= ~completes
    return is_quiet


def _selected(entry: DecodeEntry, indexes: IntArray) -> DecodeEntry:
    """Return some rows of an entry, of at most one token each."""
    token_ends = np.cumsum(entry.token_counts)
    token_counts = entry.token_counts[indexes]
    return DecodeEntry(
        handles=entry.handles[indexes],
        scheduled_count_before=entry.scheduled_count_before[indexes],
        known_count_before=entry.known_count_before[indexes],
        token_counts=token_counts,
        token_ids=entry.token_ids[token_ends[indexes][token_counts > 0] - 1],
    )


def _have_blocks(state: PoolState, entry: DecodeEntry, rows: IntArray) -> bool:
    """Tell whether all regular rows that need a block can get one."""
    scheduled = entry.scheduled_count_before
    needs_block = scheduled >= state.columns.capacity[rows]
    needed_count = int(np.count_nonzero(needs_block))
    if needed_count == 0:
        return True
    slot_count_max = min(
        (state.spec.block_count - 1) * state.spec.block_size, limits.TOKENS_PER_SEQUENCE_MAX
    )
    return (
        needed_count <= state.supply.available_count
        and np.count_nonzero(scheduled[needs_block] >= slot_count_max) == 0
    )


def _decode_regular(
    state: PoolState, step: StepContext, entry: DecodeEntry, rows: IntArray
) -> DecodeOutcome:
    scheduled = entry.scheduled_count_before
    needs_block = scheduled >= state.columns.capacity[rows]
    # Known once the step has ended, unlike all that waits.
    state.columns.scheduled[rows] = scheduled + 1
    step.spend(len(rows))
    new_block_ids = np.zeros(len(rows), dtype=np.int64)
    if _fills_written_blocks(state, entry):
        block_ids = _decode_late(state, step, entry, rows, needs_block)
    else:
        block_ids = state.supply.take(int(np.count_nonzero(needs_block)), now_ms=step.now_ms)
        state.left_over = DecodedBatch(step.step_id, entry, rows, needs_block, block_ids)
    new_block_ids[needs_block] = block_ids
    return DecodeOutcome((new_block_ids,))


def _fills_written_blocks(state: PoolState, entry: DecodeEntry) -> bool:
    """Tell whether a row supplies the last token of a block that was scheduled before."""
    known = entry.known_count_before
    if known is entry.scheduled_count_before:
        return False
    is_late = (entry.token_counts == 1) & (entry.scheduled_count_before > known)
    return bool(np.count_nonzero(is_late & ((known + 1) % state.spec.block_size == 0)))


def _decode_late(
    state: PoolState,
    step: StepContext,
    entry: DecodeEntry,
    rows: IntArray,
    needs_block: npt.NDArray[np.bool_],
) -> array[int]:
    """Take the rows' new blocks and let full ones enter the index, row by row.

    Some full blocks were written by earlier steps: as twins they may take a place, and free the
    block that had it, which a later row gets.
    """
    completes = advance(state, entry, rows, needs_block=needs_block, step_id=step.step_id)
    visited = np.flatnonzero(needs_block | completes)
    visits = zip(
        entry.handles[visited].tolist(),
        needs_block[visited].tolist(),
        completes[visited].tolist(),
        state.columns.tail[rows[visited]],
        strict=True,
    )
    block_ids: array[int] = array("q")
    for handle, needs, is_full, tail in visits:
        sequence = state.sequences[handle]
        if needs:
            block_ids.append(state.supply.take_one(now_ms=step.now_ms))
            sequence.private_block_ids.append(block_ids[-1])
        if is_full:
            sequence.full_tokens += tail.tobytes()
            complete_blocks(state, sequence, step.step_id)
    return block_ids


def _apply_row(
    state: PoolState, step: StepContext, entry: DecodeEntry, index: int, token_end: int
) -> int | BlockCopy:
    """Apply one row; returns its new block, 0 where it needs none, or the copy it needs."""
    handle = Handle(int(entry.handles[index]))
    sequence = state.sequences.get(handle)
    if sequence is None:
        raise SequenceNotFound(f"no open sequence has handle {handle}")
    columns = state.columns
    row = sequence.row
    position = int(entry.scheduled_count_before[index])
    check_position(state, entry, index, row)
    token_count = int(entry.token_counts[index])
    end_count = max(position + 1, int(columns.known[row]) + token_count)
    if end_count > limits.TOKENS_PER_SEQUENCE_MAX:
        raise LimitExceeded(f"the sequence would have {end_count} tokens")
    if step.budget_left == 0:
        raise TokenBudgetSpent("the step's token budget is used up")
    new_block: int | BlockCopy = 0
    tail = shared_tail(state, sequence, position=position)
    if tail is not None:
        tail.check_ready()
        table_count = sequence.block_count
        check_supply(
            state,
            new_block_count=1,
            total_block_count=table_count,
            match=Match(start_block=table_count),
        )
        own_block_id = state.supply.take_one(now_ms=step.now_ms)
        new_block = copy_tail(state, step, sequence, tail, own_block_id)
    elif position >= columns.capacity[row]:
        table_count = sequence.block_count
        check_supply(
            state,
            new_block_count=1,
            total_block_count=table_count + 1,
            match=Match(start_block=table_count),
        )
        new_block = state.supply.take_one(now_ms=step.now_ms)
        sequence.private_block_ids.append(new_block)
        slot_count = sequence.block_count * state.spec.block_size
        columns.capacity[row] = min(slot_count, limits.TOKENS_PER_SEQUENCE_MAX)
    columns.add_tokens(sequence, entry.token_ids[token_end - token_count : token_end])
    columns.scheduled[row] = position + 1
    columns.planned_step_id[row] = step.step_id
    step.spend(1)
    complete_blocks(state, sequence, step.step_id)
    note_tail(state, sequence)
    return new_block


def check_position(state: PoolState, entry: DecodeEntry, index: int, row: int) -> None:
    """Raise PositionMismatch unless a row says where its sequence stands."""
    columns = state.columns
    for expected, column in (
        (int(entry.scheduled_count_before[index]), columns.scheduled),
        (int(entry.known_count_before[index]), columns.known),
    ):
        if column[row] != expected:
            raise PositionMismatch(
                f"the position is {column[row]}, not {expected}",
                numbers={"needed_count": expected, "available_count": int(column[row])},
            )
    if columns.cut[row]:
        raise PositionMismatch("the sequence was cut by a failed step and needs an extend")
