"""Copies of blocks, made before a step's forward pass (S16).

On write: a block that forks share is copied before one of them writes into it. Of a partial match:
the matched tokens are copied into the first new block of the sequence.
"""

from dataclasses import dataclass

from prefixd.controller.core.errors import CopyInSameStep
from prefixd.controller.core.match import PartialMatch
from prefixd.controller.core.messages import BlockCopy, BlockId
from prefixd.controller.core.node import Lane
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState, StepContext


@dataclass(frozen=True, slots=True)
class SharedTail:
    """The first `token_count` tokens of a shared block, which a writer needs in one of its own.

    `is_read`: an earlier entry of the step made the writer read the block.
    """

    block_index: int
    source_block_id: BlockId
    token_count: int
    is_ready: bool
    is_read: bool

    def check_ready(self) -> None:
        """Raise CopyInSameStep unless earlier steps left the tokens where they are copied from."""
        if not self.is_ready:
            raise CopyInSameStep(
                f"block {self.source_block_id} holds tokens of this step",
                numbers={"block_id": self.source_block_id},
            )


def shared_tail(state: PoolState, sequence: Sequence, *, position: int) -> SharedTail | None:
    """Find the shared block that a sequence would write into from a position on, if there is one.

    Changes nothing. A block also counts as shared while a sequence that was planned and closed in
    this step reads it.
    """
    columns = state.columns
    if not columns.shares_tail[sequence.row]:
        return None
    block_index, token_count = divmod(position, state.spec.block_size)
    if not _is_shared(state, sequence, block_index):
        return None
    assert token_count > 0, "a shared block holds tokens of all its holders"
    block_id = sequence.private_block_ids[block_index - sequence.indexed_count]
    return SharedTail(
        block_index=block_index,
        source_block_id=BlockId(block_id),
        token_count=token_count,
        is_ready=state.log.scheduled_before(sequence.row) >= position
        and not state.supply.is_target(block_id),
        is_read=bool(columns.planned_step_id[sequence.row] == state.log.next_id),
    )


def _is_shared(state: PoolState, sequence: Sequence, block_index: int) -> bool:
    at = block_index - sequence.indexed_count
    if not 0 <= at < len(sequence.private_block_ids):
        return False
    block_id = sequence.private_block_ids[at]
    return (
        sequence.borrowed is not None
        or block_id in state.twins.table_counts
        or state.supply.is_read(block_id)
        or state.windows.shares(sequence, block_index, step_id=state.log.next_id)
    )


def copy_tail(
    state: PoolState, step: StepContext, sequence: Sequence, tail: SharedTail, target_block_id: int
) -> BlockCopy:
    """Put a new block into the table in place of a shared one; returns the copy to make."""
    state.supply.replace_shared(
        sequence,
        tail.block_index,
        target_block_id,
        now_ms=step.now_ms,
        step_id=step.step_id,
        is_read=tail.is_read,
    )
    state.columns.planned_step_id[sequence.row] = step.step_id
    step.copy_count += 1
    return BlockCopy(
        handle=sequence.handle,
        group_index=0,
        source_block_id=tail.source_block_id,
        target_block_id=BlockId(target_block_id),
        token_count=tail.token_count,
        block_index=tail.block_index,
    )


def keep_source(state: PoolState, step: StepContext, partial: PartialMatch) -> Lane:
    """Keep a partially matched place's blocks for this step; the hit refreshes them (S18, S22).

    The match in front of it must be held already. Returns the first group's block's own lane.
    """
    lane = state.index.isolate(partial)
    state.supply.keep_source(lane, now_ms=step.now_ms, step_id=step.step_id)
    for block in partial.window_sources.values():
        state.windows.keep_source(block, now_ms=step.now_ms, step_id=step.step_id)
    return lane


def copy_partial(
    state: PoolState,
    step: StepContext,
    sequence: Sequence,
    partial: PartialMatch,
    source: Lane,
    block_index: int,
) -> tuple[BlockCopy, ...]:
    """Return the copies of a partial match into the new blocks at a place of the tables."""
    state.columns.planned_step_id[sequence.row] = step.step_id
    step.copy_count += 1
    target_block_id = sequence.private_block_ids[block_index - sequence.indexed_count]
    state.supply.note_target(target_block_id)
    ends = [(0, source.block_ids[0], target_block_id)]
    for group_index, block in partial.window_sources.items():
        target = sequence.window_tables[group_index].blocks[block_index]
        assert target is not None, "new blocks stand at the end of a table"
        ends.append((group_index, block.block_id, target.block_id))
    return tuple(
        BlockCopy(
            handle=sequence.handle,
            group_index=group_index,
            source_block_id=BlockId(source_block_id),
            target_block_id=BlockId(target_block_id),
            token_count=partial.token_count,
            block_index=block_index,
        )
        for group_index, source_block_id, target_block_id in ends
    )


def note_tail(state: PoolState, sequence: Sequence) -> None:
    """Forget that a sequence shared a block, once none that it may still write into is shared.

    Rollbacks end at the known count, so what lies before the smaller of both is not written again.
    """
    columns = state.columns
    row = sequence.row
    if columns.shares_tail[row]:
        position = min(int(columns.known[row]), int(columns.scheduled[row]))
        block_index = position // state.spec.block_size
        columns.shares_tail[row] = _is_shared(state, sequence, block_index)
