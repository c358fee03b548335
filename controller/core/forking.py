"""Forks: children that share their parent's blocks (rule S16)."""

from array import array

import numpy as np

from prefixd.controller.core import limits
from prefixd.controller.core.copying import note_tail
from prefixd.controller.core.errors import (
    LimitExceeded,
    PositionMismatch,
    SequenceExists,
    SequenceNotFound,
)
from prefixd.controller.core.messages import (
    ForkEntry,
    ForkOutcome,
    GroupPlan,
    SequencePlan,
    SlotRuns,
    TokenRange,
)
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState


def fork_sequence(state: PoolState, entry: ForkEntry) -> ForkOutcome:
    """Make a child with the parent's first tokens and the blocks that hold them.

    The child knows and has scheduled exactly these tokens. It takes no block and no budget, counts
    in no statistics, and is allowed while the pool drains: it is part of an answer that runs.
    Raises SequenceNotFound, SequenceExists, LimitExceeded or PositionMismatch (known_count,
    scheduled_count), and has changed nothing then.
    """
    parent = state.sequences.get(entry.parent_handle)
    if parent is None:
        raise SequenceNotFound(
            f"no open sequence has handle {entry.parent_handle}",
            numbers={"handle": entry.parent_handle},
        )
    check_names(state, handle=entry.child_handle, sequence_id=entry.child_sequence_id)
    _check_token_count(state, parent, entry.token_count)
    _check_window(state, parent, entry.token_count)
    child = _add_child(state, parent, entry)
    _share_blocks(state, child, parent, token_count=entry.token_count)
    return ForkOutcome(
        SequencePlan(
            handle=child.handle,
            cached=TokenRange(0, entry.token_count),
            scheduled=TokenRange(entry.token_count, entry.token_count),
            groups=(
                GroupPlan(start_block=0, block_ids=child.table(), slots=_no_slots()),
                *_window_plans(child),
            ),
        )
    )


def _check_window(state: PoolState, parent: Sequence, token_count: int) -> None:
    if not state.windows.has_window(parent, token_count=token_count):
        raise PositionMismatch(
            f"sequence {parent.sequence_id!r} has freed the window before {token_count}",
            numbers={
                "token_count": token_count,
                "scheduled_count": int(state.columns.scheduled[parent.row]),
            },
        )


def _window_plans(child: Sequence) -> list[GroupPlan]:
    return [
        GroupPlan(
            start_block=0,
            block_ids=np.array(table.block_ids(), dtype=np.int64),
            slots=_no_slots(),
        )
        for table in child.window_tables.values()
    ]


def check_names(state: PoolState, *, handle: int, sequence_id: str) -> None:
    """Raise SequenceExists or LimitExceeded where no new sequence may have these names."""
    if handle in state.sequences:
        raise SequenceExists(
            f"handle {handle} belongs to an open sequence", numbers={"handle": handle}
        )
    if sequence_id in state.handles:
        raise SequenceExists(f"sequence {sequence_id!r} is open")
    if len(state.sequences) >= limits.SEQUENCES_PER_POOL_MAX:
        raise LimitExceeded(
            f"{limits.SEQUENCES_PER_POOL_MAX} sequences are open",
            numbers={"sequences_per_pool_max": limits.SEQUENCES_PER_POOL_MAX},
        )


def _check_token_count(state: PoolState, parent: Sequence, token_count: int) -> None:
    known_count = int(state.columns.known[parent.row])
    scheduled_count = int(state.columns.scheduled[parent.row])
    if token_count > min(known_count, scheduled_count):
        raise PositionMismatch(
            f"sequence {parent.sequence_id!r} has {known_count} tokens known and"
            f" {scheduled_count} scheduled, too few for a fork of {token_count}",
            numbers={
                "token_count": token_count,
                "known_count": known_count,
                "scheduled_count": scheduled_count,
            },
        )


def _add_child(state: PoolState, parent: Sequence, entry: ForkEntry) -> Sequence:
    columns = state.columns
    row = columns.take_row()
    child = Sequence(
        parent.keys,
        handle=entry.child_handle,
        sequence_id=entry.child_sequence_id,
        identity=parent.identity,
        row=row,
        model_version=parent.model_version,
    )
    child.skip_cache_read = parent.skip_cache_read
    child.retention_hint = parent.retention_hint
    child.uncacheable = parent.uncacheable
    child.cached_count = entry.token_count
    columns.take_over_tokens(child, parent, token_count=entry.token_count)
    columns.scheduled[row] = entry.token_count
    columns.written[row] = min(int(columns.written[parent.row]), entry.token_count)
    state.log.inherit(row, parent_row=parent.row, end=entry.token_count)
    state.sequences[child.handle] = child
    state.handles[child.sequence_id] = child.handle
    state.rows[child.handle] = row
    return child


def _share_blocks(state: PoolState, child: Sequence, parent: Sequence, *, token_count: int) -> None:
    block_size = state.spec.block_size
    full_count, rest = divmod(token_count, block_size)
    block_count = full_count + (rest > 0)
    # The path of an uncacheable parent may be shorter than its full blocks.
    state.index.hold_path(child, parent, block_count=min(full_count, parent.indexed_count))
    state.twins.share_twins(child, parent)
    if block_count > child.indexed_count:
        _share_private(state, child, parent, block_count=block_count)
    state.windows.share(child, parent, token_count=token_count)
    if rest:
        state.columns.shares_tail[[parent.row, child.row]] = True
        note_tail(state, parent)
    slot_count = block_count * block_size
    state.columns.capacity[child.row] = min(slot_count, limits.TOKENS_PER_SEQUENCE_MAX)


def _share_private(
    state: PoolState, child: Sequence, parent: Sequence, *, block_count: int
) -> None:
    """Share what stands behind the child's path: its partial block, or all of an uncacheable's."""
    twins = state.twins
    block_index = child.indexed_count
    if block_index < parent.indexed_count:
        own_block_id = parent.twins.get(block_index)
        if own_block_id is None:
            child.borrowed = state.index.lend(parent, block_index)
            child.private_block_ids = array("q", child.borrowed.block_ids)
        else:
            twins.share(own_block_id)
            child.private_block_ids = array("q", [own_block_id])
        return
    child.private_block_ids = parent.private_block_ids[: block_count - block_index]
    if parent.borrowed is not None:
        child.borrowed = parent.borrowed
        child.borrowed.holder_count += 1
        return
    for block_id in child.private_block_ids:
        twins.share(block_id)


def _no_slots() -> SlotRuns:
    return SlotRuns(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
