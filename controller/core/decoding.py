"""Decode entries: one position of each of many sequences.

Rows that stay inside their block touch nothing shared, so they are applied all at once; the others
go one by one, in order.
"""

import numpy as np
import numpy.typing as npt

from prefixd.controller.core import limits
from prefixd.controller.core.completion import complete_blocks
from prefixd.controller.core.errors import (
    CacheError,
    LimitExceeded,
    PositionMismatch,
    SequenceNotFound,
    TokenBudgetSpent,
)
from prefixd.controller.core.index import Match
from prefixd.controller.core.messages import (
    DecodeEntry,
    DecodeOutcome,
    DeferredRow,
    Handle,
    IntArray,
)
from prefixd.controller.core.scheduling import check_supply
from prefixd.controller.core.state import PoolState, StepContext


def decode(state: PoolState, step: StepContext, entry: DecodeEntry) -> DecodeOutcome:
    """Schedule one position per row; a row that cannot be is deferred and changes nothing."""
    row_count = len(entry.handles)
    new_block_ids = np.zeros(row_count, dtype=np.int64)
    token_ends = np.cumsum(entry.token_counts)
    rest = _apply_plain_rows(state, step, entry, token_ends)
    deferred: list[DeferredRow] = []
    for index in rest.tolist():
        try:
            new_block_ids[index] = _apply_row(state, step, entry, index, int(token_ends[index]))
        except CacheError as error:
            numbers = error.numbers
            deferred.append(
                DeferredRow(
                    index,
                    error.reason,
                    numbers.get("needed_count", 0),
                    numbers.get("available_count", 0),
                )
            )
    return DecodeOutcome((new_block_ids,), tuple(deferred))


def _apply_plain_rows(
    state: PoolState, step: StepContext, entry: DecodeEntry, token_ends: IntArray
) -> IntArray:
    """Apply the rows that stay inside their block; returns the indices of the others."""
    row_count = len(entry.handles)
    everything = np.arange(row_count)
    if step.budget_left is not None and step.budget_left < row_count:
        return everything
    rows_or_none = list(map(state.rows.get, entry.handles.tolist()))
    if None in rows_or_none:
        return everything
    rows: IntArray = np.array(rows_or_none, dtype=np.int64)
    is_plain = _is_plain(state, entry, rows)
    rows = rows[is_plain]
    columns = state.columns
    known = entry.known_count_before[is_plain]
    columns.tail[rows, known % state.spec.block_size] = entry.token_ids[token_ends[is_plain] - 1]
    columns.known[rows] = known + 1
    columns.scheduled[rows] = entry.scheduled_count_before[is_plain] + 1
    columns.planned_step_id[rows] = step.step_id
    step.spend(len(rows))
    return np.flatnonzero(~is_plain)


def _is_plain(state: PoolState, entry: DecodeEntry, rows: IntArray) -> npt.NDArray[np.bool_]:
    columns = state.columns
    known = entry.known_count_before
    scheduled = entry.scheduled_count_before
    is_plain: npt.NDArray[np.bool_] = entry.token_counts == 1
    is_plain &= columns.known[rows] == known
    is_plain &= columns.scheduled[rows] == scheduled
    is_plain &= scheduled >= known
    is_plain &= scheduled < columns.capacity[rows]
    is_plain &= (known + 1) % state.spec.block_size != 0
    is_plain &= ~columns.cut[rows]
    return is_plain


def _apply_row(
    state: PoolState, step: StepContext, entry: DecodeEntry, index: int, token_end: int
) -> int:
    """Apply one row; returns its new block, 0 where it needs none."""
    handle = Handle(int(entry.handles[index]))
    sequence = state.sequences.get(handle)
    if sequence is None:
        raise SequenceNotFound(f"no open sequence has handle {handle}")
    columns = state.columns
    row = sequence.row
    position = int(entry.scheduled_count_before[index])
    _check_position(state, entry, index, row)
    token_count = int(entry.token_counts[index])
    end_count = max(position + 1, int(columns.known[row]) + token_count)
    if end_count > limits.TOKENS_PER_SEQUENCE_MAX:
        raise LimitExceeded(f"the sequence would have {end_count} tokens")
    if step.budget_left == 0:
        raise TokenBudgetSpent("the step's token budget is used up")
    new_block_id = 0
    if position >= columns.capacity[row]:
        table_count = sequence.block_count
        check_supply(
            state,
            new_block_count=1,
            total_block_count=table_count + 1,
            match=Match(start_block=table_count),
        )
        (new_block_id,) = state.supply.take(1, now_ms=step.now_ms)
        sequence.private_block_ids.append(new_block_id)
        slot_count = sequence.block_count * state.spec.block_size
        columns.capacity[row] = min(slot_count, limits.TOKENS_PER_SEQUENCE_MAX)
    columns.add_tokens(sequence, entry.token_ids[token_end - token_count : token_end])
    columns.scheduled[row] = position + 1
    columns.planned_step_id[row] = step.step_id
    step.spend(1)
    complete_blocks(state, sequence, step.step_id)
    return new_block_id


def _check_position(state: PoolState, entry: DecodeEntry, index: int, row: int) -> None:
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
