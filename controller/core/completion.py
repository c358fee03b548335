"""Full blocks enter the index when all their tokens are known and their positions scheduled."""

from __future__ import annotations

from array import array

from prefixd.controller.core.index import WrittenRun
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState


def complete_blocks(state: PoolState, sequence: Sequence, step_id: StepId) -> None:
    """Let a sequence's newly full blocks enter the index, or become twins (S10, S15)."""
    columns = state.columns
    row = sequence.row
    ready_count = min(int(columns.known[row]), int(columns.scheduled[row]))
    end = ready_count // state.spec.block_size
    if sequence.indexed_count < end and not sequence.uncacheable:
        enter_blocks(state, sequence, _written_runs(state, sequence, end, step_id))
    if state.windows.count and sequence.window_entered_count < end and not sequence.uncacheable:
        state.windows.complete(sequence, end, step_id)


def enter_blocks(state: PoolState, sequence: Sequence, runs: list[WrittenRun]) -> None:
    """Let a cacheable sequence's full blocks up to the last run's end enter the index."""
    index = state.index
    end = runs[-1][1]
    while sequence.indexed_count < end:
        start = sequence.indexed_count
        is_shared = sequence.private_block_ids[0] in state.twins.table_counts
        if not is_shared and _may_extend_leaf(sequence):
            index.extend_leaf(sequence, _pop_private(sequence, end - start), runs)
            return
        key = sequence.child_key(start, block_bytes=index.block_bytes)
        node = index.children_of(sequence).children.get(key)
        if node is None and is_shared:
            # A fork has the block's leading tokens: it borrows the block, which stands alone then.
            run = next(run for run in runs if run[1] > start)
            index.add_node(sequence, _pop_private(sequence, 1), [(run[0], start + 1)])
            assert sequence.leaf is not None
            state.twins.borrow(sequence.leaf.lane)
            continue
        if node is None:
            index.add_node(sequence, _pop_private(sequence, end - start), runs)
            return
        state.twins.add_twin(sequence, node, _pop_private(sequence, 1)[0])


def enter_next_block(state: PoolState, sequence: Sequence, end: int, step_id: StepId) -> bool:
    """Let the block that ends a table of `end` full blocks enter the index, where it only lengthens
    the sequence's leaf; False, and nothing is changed, where more has to be done.

    The step `step_id` wrote it. This is `enter_blocks` without its generality: every sequence that
    decodes comes here once per block.
    """
    leaf = sequence.leaf
    if (
        leaf is None
        or sequence.indexed_count + 1 != end
        or sequence.private_block_ids[0] in state.twins.table_counts
        or sequence.keys.varied_keys
        or not _may_extend_leaf(sequence)
    ):
        return False
    state.index.append_block(sequence, leaf, step_id)
    return True


def _may_extend_leaf(sequence: Sequence) -> bool:
    leaf = sequence.leaf
    return (
        leaf is not None
        and leaf.lane.holder_count == 1
        and not leaf.children
        and not leaf.lane.twins
        and (leaf.lane.claims is None or not leaf.lane.claims.marks_end)
        and sequence.indexed_count - 1 not in sequence.twins
    )


def _pop_private(sequence: Sequence, block_count: int) -> array[int]:
    block_ids = sequence.private_block_ids[:block_count]
    del sequence.private_block_ids[:block_count]
    return block_ids


def _written_runs(
    state: PoolState, sequence: Sequence, end: int, step_id: StepId
) -> list[WrittenRun]:
    runs: list[WrittenRun] = []
    at = sequence.indexed_count
    block_size = state.spec.block_size
    for writing_step_id, bound in state.log.scheduled_bounds(sequence.row):
        run_end = min(bound // block_size, end)
        if run_end > at:
            runs.append((writing_step_id, run_end))
            at = run_end
    if at < end:
        runs.append((step_id, end))
    return runs
