"""Several blocks with equal content (rule S15).

The index has one block per place. A sequence that completes an equal block keeps it as a private
copy. A copy takes the place once it is written and the indexed block is idle or unwritten; the last
holder of the indexed block hands the place to a written copy. Until then an idle indexed block
stays where it is: were it given up for an unwritten copy, a failed step would lose published
content.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.index import PrefixIndex
from prefixd.controller.core.messages import BlockId, BlockRemap, Handle, StepId
from prefixd.controller.core.node import Lane, Node, PrivateCopy
from prefixd.controller.core.sequences import Sequence, SequenceColumns
from prefixd.controller.core.step_log import StepLog


class Twins:
    """Private copies and the places that they may take.

    Invariants: `unsettled` has every lane with an unwritten copy; `table_counts` has the blocks
    outside the index that stand in more than one table, with the number of tables: copies, and
    blocks that forks share. With `merge_duplicates`, `unmerged` has every lane with a written copy.
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

    def is_written(self, copy: PrivateCopy) -> bool:
        """Tell whether the step that wrote a copy was executed."""
        end = (copy.block_index + 1) * self._columns.block_size
        return int(self._columns.written[copy.sequence.row]) >= end

    def add_copy(self, sequence: Sequence, node: Node, block_id: int) -> None:
        """Append a place that is indexed already to a path, with the sequence's own block."""
        upper = self._index.split(node, 1) if node.block_count > 1 else node
        copy = PrivateCopy(sequence, block_id, sequence.indexed_count, self._next_serial())
        upper.lane.copies.append(copy)
        sequence.copies[copy.block_index] = block_id
        sequence.leaf = upper
        sequence.indexed_count += 1
        self.unsettled[upper.lane] = None
        self._settle(upper.lane)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def settle(self) -> None:
        """Let copies take places: once the blocks of an executed step are published.

        The place with the oldest copy comes first, so the order does not depend on copies that are
        gone.
        """
        for lane in sorted(self.unsettled, key=_oldest_serial):
            self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        written = [copy for copy in lane.copies if self.is_written(copy)]
        is_unwritten = bool(lane.pending) and lane.pending[0].step_id > self._log.settled_id
        if written and (lane.is_linked or is_unwritten):
            self._take_place(lane, written[0])
        if all(self.is_written(copy) for copy in lane.copies):
            self.unsettled.pop(lane, None)
        if self._merge_duplicates and lane.copies:
            self.unmerged[lane] = None

    def merge(self) -> tuple[BlockRemap, ...]:
        """Give up every written copy for the indexed block, which is published and held.

        Tables are repointed in the order of their sequences' handles; blocks that stand in no table
        any more go to the very front of the free order.
        """
        merged = [
            (copy, lane) for lane in self.unmerged for copy in lane.copies if self.is_written(copy)
        ]
        self.unmerged.clear()
        merged.sort(key=lambda pair: (pair[0].sequence.handle, pair[0].block_index))
        freed: list[int] = []
        for copy, lane in merged:
            assert lane.published_count
            assert lane.holder_count
            self.drop_copy(copy.sequence, lane, copy.block_index)
            lane.holder_count += 1
            if self.leave_table(copy.block_id):
                freed.append(copy.block_id)
        self._order.push_front(freed)
        return tuple(
            BlockRemap(
                handle=copy.sequence.handle,
                group_index=0,
                block_index=copy.block_index,
                old_block_id=BlockId(copy.block_id),
                new_block_id=BlockId(lane.block_ids[0]),
            )
            for copy, lane in merged
        )

    def forget(self, lane: Lane) -> None:
        """Say that a lane has left the index."""
        self.unsettled.pop(lane, None)
        self.unmerged.pop(lane, None)

    def forget_all(self) -> None:
        """Say that every lane has left the index."""
        self.unsettled.clear()
        self.unmerged.clear()

    def _take_place(self, lane: Lane, copy: PrivateCopy) -> None:
        old_block_id = lane.block_ids[0]
        if lane.is_linked:
            push_front = (
                self._order.push_front_withheld if lane.withheld else self._order.push_front
            )
            self._order.remove(lane)
            self._repoint(lane, copy.block_id)
            push_front([old_block_id])
        else:
            holders = self._holders(lane, copy.block_index)
            borrowers = [one for one in self._sequences.values() if one.borrowed is lane]
            holder_count = lane.holder_count
            assert len(holders) + len(borrowers) == holder_count
            for borrower in borrowers:
                borrower.borrowed = None
            self._repoint(lane, copy.block_id)
            serial = self._next_serial()
            for holder in holders:
                holder.copies[copy.block_index] = old_block_id
                lane.copies.append(PrivateCopy(holder, old_block_id, copy.block_index, serial))
            if holder_count > 1:
                self.table_counts[old_block_id] = holder_count
        if lane.pending:
            self._index.publish_whole(lane)

    def _holders(self, lane: Lane, block_index: int) -> list[Sequence]:
        return [
            sequence
            for sequence in self._sequences.values()
            if block_index not in sequence.copies
            and any(node is lane.node for node, _ in sequence.path())
        ]

    def _repoint(self, lane: Lane, block_id: int) -> None:
        takers = [copy for copy in lane.copies if copy.block_id == block_id]
        lane.copies = [copy for copy in lane.copies if copy.block_id != block_id]
        for taker in takers:
            del taker.sequence.copies[taker.block_index]
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

    def share_copies(self, child: Sequence, parent: Sequence) -> None:
        """Put the copies on a fork's path into its table."""
        for node, start in child.path():
            block_id = parent.copies.get(start)
            if block_id is None:
                continue
            copies = node.lane.copies
            at = next(at for at, copy in enumerate(copies) if copy.sequence is parent)
            copies.insert(at + 1, PrivateCopy(child, block_id, start, copies[at].serial))
            child.copies[start] = block_id
            self.share(block_id)

    def pass_on(self, lane: Lane) -> bool:
        """Hand a place that nobody holds any more to a written copy; False where there is none."""
        copy = next((copy for copy in lane.copies if self.is_written(copy)), None)
        if copy is None:
            return False
        self._repoint(lane, copy.block_id)
        return True

    def replace(self, lane: Lane) -> int:
        """Give up an idle block for new use; its place goes to the oldest copy, still unwritten.

        Returns the block. The caller has taken the lane out of the free order.
        """
        block_id = lane.block_ids[0]
        copy = lane.copies[0]
        assert not self.is_written(copy)
        self._repoint(lane, copy.block_id)
        if not lane.copies:
            self.unsettled.pop(lane, None)
        self._index.write_again(lane, self._writing_step_id(copy))
        return block_id

    def _writing_step_id(self, copy: PrivateCopy) -> StepId:
        end = (copy.block_index + 1) * self._columns.block_size
        for step_id, bound in self._log.scheduled_bounds(copy.sequence.row):
            if bound >= end:
                return step_id
        return self._log.next_id

    def drop_copy(self, sequence: Sequence, lane: Lane, block_index: int) -> int:
        """Take a sequence's own block out of its table; returns the block."""
        block_id = sequence.copies.pop(block_index)
        lane.copies = [copy for copy in lane.copies if copy.sequence is not sequence]
        if all(self.is_written(copy) for copy in lane.copies):
            self.unsettled.pop(lane, None)
        if lane.pending:
            # What the sequence wrote behind its copy is of use only with the indexed block.
            step_ids = [self._writing_step_id(copy) for copy in lane.copies]
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
    return lane.copies[0].serial
