"""What an entry leaves to do behind its reply.

The reply needs the blocks only. Columns, tables and the index can wait until it is on its way, or
until anything else looks at the pool: `catch_up` comes first then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.controller.core import limits
from prefixd.controller.core.completion import complete_blocks, enter_blocks, enter_next_block
from prefixd.controller.core.copying import note_tail
from prefixd.controller.core.messages import DecodeEntry, IntArray, StepId
from prefixd.controller.core.state import DecodedBatch, OpenedSequence, PoolState


def catch_up(state: PoolState) -> None:
    """Do what the last entry left to do."""
    left_over = state.left_over
    if left_over is None:
        return
    state.left_over = None
    match left_over:
        case DecodedBatch():
            _finish_decoding(state, left_over)
        case OpenedSequence():
            state.columns.add_tokens(left_over.sequence, left_over.token_ids)
            complete_blocks(state, left_over.sequence, left_over.step_id)
            note_tail(state, left_over.sequence)


def _finish_decoding(state: PoolState, batch: DecodedBatch) -> None:
    """Move the rows' columns on; put new blocks into tables and full ones into the index."""
    entry, rows, needs_block = batch.entry, batch.rows, batch.needs_block
    is_full = advance(state, entry, rows, needs_block=needs_block, step_id=batch.step_id)
    sequences = state.sequences
    growing = zip(entry.handles[needs_block].tolist(), batch.block_ids, strict=True)
    for handle, block_id in growing:
        sequences[handle].private_block_ids.append(block_id)
    full_rows = rows[is_full]
    filled = zip(
        entry.handles[is_full].tolist(),
        (state.columns.known[full_rows] // state.spec.block_size).tolist(),
        state.columns.tail[full_rows],
        strict=True,
    )
    for handle, end, tail in filled:
        sequence = sequences[handle]
        sequence.full_tokens += tail.tobytes()
        if not sequence.uncacheable and not enter_next_block(state, sequence, end, batch.step_id):
            enter_blocks(state, sequence, [(batch.step_id, end)])


def advance(
    state: PoolState,
    entry: DecodeEntry,
    rows: IntArray,
    *,
    needs_block: npt.NDArray[np.bool_],
    step_id: StepId,
) -> npt.NDArray[np.bool_]:
    """Move the columns of regular rows on, but for the scheduled counts; returns which rows have
    filled a block."""
    columns = state.columns
    block_size = state.spec.block_size
    known = entry.known_count_before
    has_token = entry.token_counts == 1
    offsets = known % block_size
    tail_places = (rows * block_size + offsets)[has_token]
    columns.tail.reshape(-1)[tail_places] = entry.token_ids
    columns.known[rows] = known + entry.token_counts
    columns.planned_step_id[rows] = step_id
    growing_rows = rows[needs_block]
    columns.capacity[growing_rows] = np.minimum(
        columns.capacity[growing_rows] + block_size, limits.TOKENS_PER_SEQUENCE_MAX
    )
    is_full: npt.NDArray[np.bool_] = has_token & (offsets == block_size - 1)
    return is_full
