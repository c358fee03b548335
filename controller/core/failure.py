"""Taking back what failed steps scheduled (section 4.1 of the design, and S17)."""

from collections.abc import Iterable

from prefixd.controller.core.messages import CutSequence
from prefixd.controller.core.node import Lane, Node, pending_parent
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState
from prefixd.controller.core.window_blocks import WindowBlock


def cut_unwritten(state: PoolState, *, now_ms: int) -> tuple[CutSequence, ...]:
    """Drop every unwritten block from the index and cut every table to its published run.

    Idle unwritten blocks move to the front of the free order in the order they have; then the
    tables give back their blocks in the order in which their sequences were opened. Returns the
    sequences whose scheduled count fell.
    """
    index = state.index
    _isolate_pending(state)
    _free_idle_pending(state)
    state.windows.index.drop_pending()
    cut_sequences = tuple(
        cut
        for sequence in state.sequences.values()
        if (cut := _cut_table(state, sequence, now_ms=now_ms)) is not None
    )
    for lane in _children_first(index.pending_lanes):
        assert lane.holder_count == 0
        assert not lane.twins
        assert lane.published_count == 0
        index.remove_node(lane.node)
    index.pending_count = 0
    # What is left of the twins is written, and its places are held and published.
    state.twins.unsettled.clear()
    state.windows.index.pending.clear()
    return cut_sequences


def _children_first(pending_lanes: Iterable[Lane]) -> list[Lane]:
    """Order isolated unwritten lanes so that what is claimed at a place goes up to what stays."""
    waiting = [lane for lane in pending_lanes if pending_parent(lane) is None]
    parents_first: list[Lane] = []
    while waiting:
        lane = waiting.pop()
        parents_first.append(lane)
        waiting.extend(child.lane for child in lane.node.children.values())
    parents_first.reverse()
    return parents_first


def _isolate_pending(state: PoolState) -> None:
    for lane in list(state.index.pending_lanes):
        if lane.published_count:
            state.index.split(lane.node, lane.published_count)


def _free_idle_pending(state: PoolState) -> None:
    idle: list[int] = []
    windows = state.windows
    if not any(lane.is_linked for lane in (*state.index.pending_lanes, *windows.index.pending)):
        return
    for segment in state.order:
        if isinstance(segment, Lane) and segment.pending:
            idle.extend(reversed(segment.block_ids))
            state.order.remove(segment)
        elif isinstance(segment, WindowBlock) and windows.index.is_pending(segment):
            idle.append(segment.block_id)
            state.order.remove(segment)
            state.claims.leave_window(segment)
    state.order.push_front(idle)


def _published_count(state: PoolState, sequence: Sequence) -> int:
    """Count the leading published blocks of a table; an own written twin counts too."""
    block_size = state.spec.block_size
    written_count = int(state.columns.written[sequence.row])
    published_count = sequence.indexed_count
    for node, start in sequence.path():
        if start in sequence.twins:
            is_published = written_count >= (start + 1) * block_size
        else:
            is_published = not node.lane.pending
        if not is_published:
            published_count = start
    return published_count


def _split_path(state: PoolState, sequence: Sequence, kept_count: int) -> None:
    """Let a node of the path end where a table is going to be cut."""
    for node, start in list(sequence.path()):
        if start < kept_count < start + node.block_count:
            state.index.split(node, kept_count - start)


def _cut_table(state: PoolState, sequence: Sequence, *, now_ms: int) -> CutSequence | None:
    kept_count = state.windows.agreed_count(sequence, _published_count(state, sequence))
    _split_path(state, sequence, kept_count)
    uncached: list[int] = []
    borrowed = sequence.borrowed
    for block_id in reversed(sequence.private_block_ids[0 if borrowed is None else 1 :]):
        if state.twins.leave_table(block_id):
            uncached.append(block_id)
    del sequence.private_block_ids[:]
    if borrowed is not None:
        sequence.borrowed = None
        next_id = state.log.next_id
        uncached.extend(state.supply.take_back(sequence, borrowed, now_ms=now_ms, step_id=next_id))
    for node, start in list(sequence.path()):
        if start < kept_count:
            break
        lane = node.lane
        if start in sequence.twins:
            own_block_id = state.twins.drop_twin(sequence, lane, start)
            if state.twins.leave_table(own_block_id):
                uncached.append(own_block_id)
        elif not lane.pending:
            assert state.windows.count, "nothing published stands behind an unwritten block"
            uncached.extend(state.supply.leave(lane, now_ms=now_ms, step_id=state.log.next_id))
        else:
            lane.holder_count -= 1
            if lane.holder_count == 0:
                uncached.extend(reversed(lane.block_ids))
        sequence.leaf = node.parent if isinstance(node.parent, Node) else None
        sequence.indexed_count = start
    state.order.push_front(uncached)
    state.windows.cut(sequence, kept_count, now_ms=now_ms)
    return _cut_positions(state, sequence)


def _cut_positions(state: PoolState, sequence: Sequence) -> CutSequence | None:
    columns = state.columns
    row = sequence.row
    kept_token_count = sequence.indexed_count * state.spec.block_size
    columns.capacity[row] = kept_token_count
    columns.shares_tail[row] = False
    if columns.scheduled[row] <= kept_token_count:
        return None
    sequence.lost_count = max(sequence.lost_count, int(columns.written[row]))
    columns.scheduled[row] = kept_token_count
    columns.written[row] = kept_token_count
    columns.cut[row] = True
    return CutSequence(sequence.handle, int(columns.known[row]), kept_token_count)
