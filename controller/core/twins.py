"""Several blocks with equal content (rule S15).

The index has one block per place. A sequence that completes an equal block keeps it, as a twin. A
twin takes the place once it is written and the indexed block is idle or unwritten; the last holder
of the indexed block hands the place to a written twin. Until then an idle indexed block stays where
it is: were it given up for an unwritten twin, a failed step would lose published content.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixd.controller.core import node as nodes
from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.index import PrefixIndex
from prefixd.controller.core.messages import BlockId, BlockRemap, Handle, StepId
from prefixd.controller.core.node import Lane, Node, Twin
from prefixd.controller.core.sequences import Sequence, SequenceColumns
from prefixd.controller.core.step_log import StepLog


class Twins:
    """Twins and the places that they may take.

    Invariants: `unsettled` has every lane with an unwritten twin; `table_counts` has the blocks
    outside the index that stand in more than one table, with the number of tables: twins, and
    blocks that forks share. With `merge_duplicates`, `unmerged` has every lane with a written twin.
    """

    def __init__(
        self,
        index: PrefixIndex,
        order: FreeOrder,
        columns: SequenceColumns,
        log: StepLog,
        sequences: Mapping[Handle, Sequence],
        *,
        merge_duplicates: bool,
    ) -> None:
        self.unsettled: dict[Lane, None] = {}
        self.unmerged: dict[Lane, None] = {}
        self.table_counts: dict[int, int] = {}
        self._serial = 0
        self._merge_duplicates = merge_duplicates
        self._index = index
        self._order = order
        self._columns = columns
        self._log = log
        self._sequences = sequences

    def is_written(self, twin: Twin) -> bool:
        """Tell whether the step that wrote a twin was executed."""
        end = (twin.block_index + 1) * self._columns.block_size
        return int(self._columns.written[twin.sequence.row]) >= end

    def add_twin(self, sequence: Sequence, node: Node, block_id: int) -> None:
        """Append a place that is indexed already to a path, with the sequence's own block."""
        upper = self._index.split(node, 1) if node.block_count > 1 else node
        twin = Twin(sequence, block_id, sequence.indexed_count, self._next_serial())
        upper.lane.twins.append(twin)
        sequence.twins[twin.block_index] = block_id
        sequence.leaf = upper
        sequence.indexed_count += 1
        self.unsettled[upper.lane] = None
        self._settle(upper.lane)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def settle(self) -> bool:
        """Let twins take places: once the blocks of an executed step are published.

        The place with the oldest twin comes first, so the order does not depend on twins that are
        gone. Returns whether places were published by it: what stands behind them may be then.
        """
        published = [self._settle(lane) for lane in sorted(self.unsettled, key=_oldest_serial)]
        return any(published)

    def _settle(self, lane: Lane) -> bool:
        written = [twin for twin in lane.twins if self.is_written(twin)]
        if written and lane.pending and nodes.pending_parent(lane) is not None:
            # A twin or this very step publishes the parent first (S25).
            return False
        was_unpublished = bool(lane.pending)
        is_unwritten = was_unpublished and lane.pending[0].step_id > self._log.settled_id
        if written and (lane.is_linked or is_unwritten):
            self._take_place(lane, written[0])
        if all(self.is_written(twin) for twin in lane.twins):
            self.unsettled.pop(lane, None)
        if self._merge_duplicates and lane.twins:
            self.unmerged[lane] = None
        return was_unpublished and not lane.pending

    def merge(self) -> tuple[BlockRemap, ...]:
        """Give up every written twin for the indexed block, which is published and held.

        Tables are repointed in the order of their sequences' handles; blocks that stand in no table
        any more go to the very front of the free order.
        """
        merged = [
            (twin, lane) for lane in self.unmerged for twin in lane.twins if self.is_written(twin)
        ]
        self.unmerged.clear()
        merged.sort(key=lambda pair: (pair[0].sequence.handle, pair[0].block_index))
        freed: list[int] = []
        for twin, lane in merged:
            assert lane.published_count
            assert lane.holder_count
            self.drop_twin(twin.sequence, lane, twin.block_index)
            lane.holder_count += 1
            if self.leave_table(twin.block_id):
                freed.append(twin.block_id)
        self._order.push_front(freed)
        return tuple(
            BlockRemap(
                handle=twin.sequence.handle,
                group_index=0,
                block_index=twin.block_index,
                old_block_id=BlockId(twin.block_id),
                new_block_id=BlockId(lane.block_ids[0]),
            )
            for twin, lane in merged
        )

    def forget(self, lane: Lane) -> None:
        """Say that a lane has left the index."""
        self.unsettled.pop(lane, None)
        self.unmerged.pop(lane, None)

    def forget_all(self) -> None:
        """Say that every lane has left the index."""
        self.unsettled.clear()
        self.unmerged.clear()

    def _take_place(self, lane: Lane, twin: Twin) -> None:
        old_block_id = lane.block_ids[0]
        if lane.is_linked:
            push_front = (
                self._order.push_front_withheld if lane.withheld else self._order.push_front
            )
            self._order.remove(lane)
            self._repoint(lane, twin.block_id)
            push_front([old_block_id])
        else:
            holders = self._holders(lane, twin.block_index)
            borrowers = [one for one in self._sequences.values() if one.borrowed is lane]
            holder_count = lane.holder_count
            assert len(holders) + len(borrowers) == holder_count
            for borrower in borrowers:
                borrower.borrowed = None
            self._repoint(lane, twin.block_id)
            serial = self._next_serial()
            for holder in holders:
                holder.twins[twin.block_index] = old_block_id
                lane.twins.append(Twin(holder, old_block_id, twin.block_index, serial))
            if holder_count > 1:
                self.table_counts[old_block_id] = holder_count
        if lane.pending:
            self._index.publish_whole(lane)

    def _holders(self, lane: Lane, block_index: int) -> list[Sequence]:
        return [
            sequence
            for sequence in self._sequences.values()
            if block_index not in sequence.twins
            and any(node is lane.node for node, _ in sequence.path())
        ]

    def _repoint(self, lane: Lane, block_id: int) -> None:
        takers = [twin for twin in lane.twins if twin.block_id == block_id]
        lane.twins = [twin for twin in lane.twins if twin.block_id != block_id]
        for taker in takers:
            del taker.sequence.twins[taker.block_index]
        lane.block_ids[0] = block_id
        lane.holder_count = len(takers)
        lane.read_step_id = StepId(0)
        self.borrow(lane)

    def borrow(self, lane: Lane) -> None:
        """Let the other tables that have a block borrow it, now that it is a lane's only one."""
        block_id = lane.block_ids[0]
        if self.table_counts.pop(block_id, 1) == lane.holder_count:
            return
        for sequence in self._sequences.values():
            if sequence.private_block_ids[:1].count(block_id):
                sequence.borrowed = lane
                lane.holder_count += 1

    def share(self, block_id: int) -> None:
        """Account for a block outside the index standing in one more table."""
        self.table_counts[block_id] = self.table_counts.get(block_id, 1) + 1

    def share_twins(self, child: Sequence, parent: Sequence) -> None:
        """Put the twins on a fork's path into its table."""
        for node, start in child.path():
            block_id = parent.twins.get(start)
            if block_id is None:
                continue
            twins = node.lane.twins
            at = next(at for at, twin in enumerate(twins) if twin.sequence is parent)
            twins.insert(at + 1, Twin(child, block_id, start, twins[at].serial))
            child.twins[start] = block_id
            self.share(block_id)

    def pass_on(self, lane: Lane) -> bool:
        """Hand a place that nobody holds any more to a written twin; False where there is none."""
        twin = next((twin for twin in lane.twins if self.is_written(twin)), None)
        if twin is None:
            return False
        self._repoint(lane, twin.block_id)
        return True

    def replace(self, lane: Lane) -> int:
        """Give up an idle block for new use; its place goes to the oldest twin, still unwritten.

        Returns the block. The caller has taken the lane out of the free order.
        """
        block_id = lane.block_ids[0]
        twin = lane.twins[0]
        assert not self.is_written(twin)
        self._repoint(lane, twin.block_id)
        if not lane.twins:
            self.unsettled.pop(lane, None)
        self._index.write_again(lane, self._writing_step_id(twin))
        return block_id

    def _writing_step_id(self, twin: Twin) -> StepId:
        end = (twin.block_index + 1) * self._columns.block_size
        for step_id, bound in self._log.scheduled_bounds(twin.sequence.row):
            if bound >= end:
                return step_id
        return self._log.next_id

    def drop_twin(self, sequence: Sequence, lane: Lane, block_index: int) -> int:
        """Take a sequence's own block out of its table; returns the block."""
        block_id = sequence.twins.pop(block_index)
        lane.twins = [twin for twin in lane.twins if twin.sequence is not sequence]
        if all(self.is_written(twin) for twin in lane.twins):
            self.unsettled.pop(lane, None)
        if lane.pending:
            # What the sequence wrote behind its twin is of use only with the indexed block.
            step_ids = [self._writing_step_id(twin) for twin in lane.twins]
            self._index.write_no_earlier(lane.node, min([lane.pending[-1].step_id, *step_ids]))
        return block_id

    def leave_table(self, block_id: int) -> bool:
        """Account for a block outside the index leaving a table; True where it was the last one."""
        count = self.table_counts.get(block_id, 1)
        if count == 1:
            return True
        if count == 2:
            del self.table_counts[block_id]
        else:
            self.table_counts[block_id] = count - 1
        return False


def _oldest_serial(lane: Lane) -> int:
    return lane.twins[0].serial
