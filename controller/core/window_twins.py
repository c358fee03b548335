"""Several window blocks with equal content, group by group (rules S15 and S23).

As in the full-attention group, the index has one block per place, and a sequence that completes an
equal one keeps it as a twin. A twin takes the place once it is written and the indexed block is
idle or unwritten; the last holder of the indexed block hands the place to a written twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prefixd.controller.core.claims import Claims
from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.messages import BlockRemap, Handle
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.window_blocks import WindowBlock, WindowPlace, twins_of
from prefixd.controller.core.window_index import WindowIndex


class WindowTwins:
    """The twins of window blocks.

    Invariants: a place has twins of a group only where it has a block of it; a twin is a full block
    of a table; beside a written one the indexed block is written and held. With `merge_duplicates`,
    `unmerged` has every written twin.
    """

    def __init__(
        self,
        index: WindowIndex,
        order: FreeOrder,
        claims: Claims,
        sequences: Mapping[Handle, Sequence],
        *,
        merge_duplicates: bool,
    ) -> None:
        self.unmerged: dict[WindowBlock, None] = {}
        self._index = index
        self._order = order
        self._claims = claims
        self._sequences = sequences
        self._merge_duplicates = merge_duplicates

    def settle(self, blocks: Iterable[WindowBlock]) -> None:
        """Let those of the written blocks that are twins take places that they may take."""
        for block in blocks:
            place = block.twin_of
            if place is None:
                continue
            indexed = place.blocks[block.group_index]
            if indexed.is_linked or self._index.is_pending(indexed):
                self._take_place(place, indexed, block)
            elif self._merge_duplicates:
                self.unmerged[block] = None

    def _take_place(self, place: WindowPlace, old: WindowBlock, twin: WindowBlock) -> None:
        is_told = not self._index.is_pending(old)
        self._index.exchange(old, twin)
        if old.is_linked:
            push_front = self._order.push_front_withheld if old.withheld else self._order.push_front
            self._order.remove(old)
            self._index.pending.pop(old, None)
            self._claims.leave_window(old)
            push_front(old.block_ids)
        else:
            old.twin_of = place
            place.twins.append(old)
            # It is the newest of the twins that are still to be written.
            del self._index.pending[old]
            self._index.pending[old] = None
        if not is_told:
            self._index.tell_stored([twin])

    def pass_on(self, block: WindowBlock) -> bool:
        """Hand a place that nobody holds any more to a written twin; False where there is none."""
        for twin in twins_of(block):
            if not self._index.is_pending(twin):
                self._index.exchange(block, twin)
                self.unmerged.pop(twin, None)
                return True
        return False

    def evict(self, block: WindowBlock) -> int:
        """Give up an idle block for new use; its place goes to the oldest twin, still unwritten.

        Returns the block's id. The caller has taken it out of the free order.
        """
        twins = twins_of(block)
        if not twins:
            return self._index.evict(block)
        assert self._index.is_pending(twins[0])
        if self._index.is_published(block):
            self._index.tell_removed(block)
        self._index.exchange(block, twins[0])
        self._index.pending.pop(block, None)
        return block.block_id

    def note_left(self, block: WindowBlock) -> None:
        """Say that a twin has left a table: it is one while a table has it as a full block.

        Forks of its former holder may have the leading tokens of it.
        """
        assert block.twin_of is not None
        if not block.holder_count or not any(True for _ in self._holders(block, block.twin_of)):
            self._index.leave_twins(block)
            self.unmerged.pop(block, None)

    def _holders(self, block: WindowBlock, place: WindowPlace) -> Iterable[tuple[Sequence, int]]:
        block_index = place.depth - 1
        for sequence in self._sequences.values():
            table = sequence.window_tables[block.group_index]
            is_full = sequence.window_entered_count > block_index
            if is_full and table.blocks[block_index] is block:
                yield sequence, block_index

    def merge(self) -> tuple[BlockRemap, ...]:
        """Give up every written twin for the indexed block, which is published and held.

        Tables are repointed in the order of their sequences' handles; blocks that stand in no table
        any more go to the very front of the free order.
        """
        merged = [
            (sequence, block_index, block, block.twin_of.blocks[block.group_index])
            for block in self.unmerged
            if block.twin_of is not None and not self._index.is_pending(block)
            for sequence, block_index in self._holders(block, block.twin_of)
        ]
        merged.sort(key=lambda one: (one[0].handle, one[1], one[2].group_index))
        freed: list[int] = []
        for sequence, block_index, block, indexed in merged:
            sequence.window_tables[block.group_index].blocks[block_index] = indexed
            indexed.holder_count += 1
            block.holder_count -= 1
            if block.holder_count == 0:
                self._claims.leave_window(block)
                freed.append(block.block_id)
        for _, _, block, _ in merged:
            if block.twin_of is not None:
                self._index.leave_twins(block)
        self.unmerged.clear()
        self._order.push_front(freed)
        return tuple(
            BlockRemap(
                handle=sequence.handle,
                group_index=block.group_index,
                block_index=block_index,
                old_block_id=block.block_id,
                new_block_id=indexed.block_id,
            )
            for sequence, block_index, block, indexed in merged
        )
