"""The KV groups of a pool behind the first: their index and what tables hold of them (rule S23).

A match is the longest length at which the full-attention groups have all blocks and every window
group those of its last window. What a window has passed leaves the table and, where it is cached,
stays matchable until its block is needed. A further full-attention group is one whose window spans
every sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prefixd.controller.core import limits
from prefixd.controller.core.claims import Claims
from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import FreedBlock, GroupKind, PoolSpec, StepId
from prefixd.controller.core.sequences import Sequence, SequenceColumns
from prefixd.controller.core.step_log import EXECUTED, StepLog
from prefixd.controller.core.window_blocks import (
    WindowBlock,
    WindowPlace,
    WindowTable,
    first_needed,
    twins_of,
)
from prefixd.controller.core.window_index import WindowIndex
from prefixd.controller.core.window_twins import WindowTwins


class WindowGroups:
    """The groups of a pool behind the first; `sizes` maps a group's index to its window in tokens.

    `full_groups` are those of full attention.
    """

    def __init__(
        self,
        spec: PoolSpec,
        index: WindowIndex,
        twins: WindowTwins,
        order: FreeOrder,
        claims: Claims,
        columns: SequenceColumns,
        log: StepLog,
    ) -> None:
        self.sizes: dict[int, int] = {}
        self.full_groups: list[int] = []
        for group_index, group in enumerate(spec.groups[1:], start=1):
            self.sizes[group_index] = group.window_token_count
            if group.kind is GroupKind.FULL_ATTENTION:
                self.sizes[group_index] = limits.TOKENS_PER_SEQUENCE_MAX
                self.full_groups.append(group_index)
        self.index = index
        self.twins = twins
        self.block_size = spec.block_size
        self._order = order
        self._claims = claims
        self._columns = columns
        self._log = log

    @property
    def count(self) -> int:
        """Groups behind the first."""
        return len(self.sizes)

    def first_needed(self, group_index: int, *, position: int) -> int:
        """Return the first block that a group's query at a position attends to."""
        return first_needed(
            position,
            window_token_count=self.sizes[group_index],
            block_size=self.block_size,
        )

    def agreed_length(self, has: Callable[[int, int], bool], *, start: int, end: int) -> int:
        """Return the longest length in blocks, from `start` to `end`, at which each group has the
        blocks of its last window, those before `start` aside. Asks for no block twice."""
        length = end
        seen_from = dict.fromkeys(self.sizes, end)
        is_stable = False
        while not is_stable:
            is_stable = True
            for group_index in self.sizes:
                first = self.first_needed(group_index, position=length * self.block_size)
                first = max(first, start)
                at = min(seen_from[group_index], length)
                while at > first and has(group_index, at - 1):
                    at -= 1
                seen_from[group_index] = at
                if at > first:
                    length = at - 1
                    is_stable = False
        return length

    def keep_source(self, block: WindowBlock, *, now_ms: int, step_id: StepId) -> None:
        """Withhold a block that this step copies from; an idle one is used last now."""
        block.source_step_id = step_id
        if block.is_linked:
            self._order.remove(block)
            block.last_use_ms = now_ms
            self._order.append(block)
            self._order.withhold(block)

    # Tables.

    def open(self, sequence: Sequence) -> None:
        """Give a new sequence empty tables."""
        sequence.window_tables = {group_index: WindowTable() for group_index in self.sizes}

    def hold(self, sequence: Sequence, match: Match) -> None:
        """Append the matched blocks to a sequence's tables; earlier places stay empty (S12)."""
        end = match.start_block + match.block_count
        for group_index, blocks in match.window_blocks.items():
            table = sequence.window_tables[group_index]
            table.blocks.extend(blocks.get(at) for at in range(match.start_block, end))
            for block in blocks.values():
                if block.is_linked:
                    self._order.remove(block)
                block.holder_count += 1
            self._claims.use(blocks.values())

    def append(self, sequence: Sequence, group_index: int, block_ids: Iterable[int]) -> None:
        """Append new blocks to a table."""
        sequence.window_tables[group_index].blocks.extend(
            WindowBlock(block_id, group_index=group_index) for block_id in block_ids
        )

    def behind_window(self, sequence: Sequence, *, position: int) -> list[FreedBlock]:
        """List the blocks that no query from `position` on attends to."""
        return [
            FreedBlock(sequence.handle, group_index, at, block.block_id)
            for group_index, table in sequence.window_tables.items()
            for at in range(table.first, self._passed_end(group_index, table, position))
            if (block := table.blocks[at]) is not None
        ]

    def _passed_end(self, group_index: int, table: WindowTable, position: int) -> int:
        return min(len(table.blocks), self.first_needed(group_index, position=position))

    def gain(self, sequence: Sequence, freed: list[FreedBlock], *, step_id: StepId) -> int:
        """Count the blocks that could be handed out within the step if these were freed (S22)."""
        if self._columns.planned_step_id[sequence.row] == step_id:
            return 0
        blocks = [sequence.window_tables[one.group_index].blocks[one.block_index] for one in freed]
        return sum(
            block is not None and block.holder_count == 1 and not block.is_used_by(step_id)
            for block in blocks
        )

    def free_behind(
        self, sequence: Sequence, freed: list[FreedBlock], *, now_ms: int, step_id: StepId
    ) -> None:
        """Free what `behind_window` listed."""
        is_read = bool(self._columns.planned_step_id[sequence.row] == step_id)
        left: list[WindowBlock] = []
        for one in freed:
            table = sequence.window_tables[one.group_index]
            block = table.blocks[one.block_index]
            assert block is not None
            table.blocks[one.block_index] = None
            table.first = one.block_index + 1
            left.append(block)
        # A window's blocks are used up in order, so the later ones are worth more.
        self._leave(left, now_ms=now_ms, step_id=step_id, is_read=is_read)

    def release(self, sequence: Sequence, *, now_ms: int, step_id: StepId, is_read: bool) -> None:
        """Take back the tables, from their ends (S17)."""
        for table in sequence.window_tables.values():
            held = table.held()
            held.reverse()
            self._leave(held, now_ms=now_ms, step_id=step_id, is_read=is_read)
        sequence.window_tables = {}
        self.index.stand_nowhere(sequence)

    def _leave(
        self, blocks: Iterable[WindowBlock], *, now_ms: int, step_id: StepId, is_read: bool
    ) -> None:
        uncached: list[WindowBlock] = []
        for block in blocks:
            block.holder_count -= 1
            if is_read:
                block.read_step_id = step_id
            if block.twin_of is not None:
                self.twins.note_left(block)
            if block.holder_count:
                continue
            if block.place is None or self.twins.pass_on(block):
                self.index.pending.pop(block, None)
                self._claims.leave_window(block)
                uncached.append(block)
                continue
            block.last_use_ms = now_ms
            self._claims.place(block)
            self._order.append(block)
            if block.is_used_by(step_id):
                self._order.withhold(block)
        for block in reversed(uncached):
            if block.is_used_by(step_id):
                self._order.push_front_withheld(block.block_ids)
            else:
                self._order.push_front(block.block_ids)

    def shares(self, sequence: Sequence, block_index: int, *, step_id: StepId) -> bool:
        """Tell whether somebody else may read a block of a sequence's tables, by now or later."""
        blocks = [table.blocks[block_index] for table in sequence.window_tables.values()]
        return any(
            block is not None
            and (block.holder_count > 1 or block.place is not None or block.read_step_id == step_id)
            for block in blocks
        )

    def replace(
        self,
        sequence: Sequence,
        group_index: int,
        block_index: int,
        block_id: int,
        *,
        now_ms: int,
        step_id: StepId,
        is_read: bool,
    ) -> int:
        """Put a block in place of a shared one, whose content this step copies (S16).

        Returns the shared one; it is not handed out before the step ends (S22). `is_read`: an
        earlier entry of the step made the sequence read it.
        """
        table = sequence.window_tables[group_index]
        source = table.blocks[block_index]
        assert source is not None, "the tail of a table is in its window"
        table.blocks[block_index] = WindowBlock(block_id, group_index=group_index)
        source.source_step_id = step_id
        self._leave((source,), now_ms=now_ms, step_id=step_id, is_read=is_read)
        return source.block_id

    def has_window(self, sequence: Sequence, *, token_count: int) -> bool:
        """Tell whether the tables hold all that a query behind `token_count` tokens attends to."""
        end = -(-token_count // self.block_size)
        return all(
            self.first_needed(group_index, position=token_count) >= end
            or all(
                block is not None
                for block in table.blocks[
                    self.first_needed(group_index, position=token_count) : end
                ]
            )
            for group_index, table in sequence.window_tables.items()
        )

    def share(self, child: Sequence, parent: Sequence, *, token_count: int) -> None:
        """Give a fork the parent's window before `token_count` (S16)."""
        end = -(-token_count // self.block_size)
        self.open(child)
        for group_index, parent_table in parent.window_tables.items():
            table = child.window_tables[group_index]
            table.first = min(end, self.first_needed(group_index, position=token_count))
            table.blocks = [*(None for _ in range(table.first))]
            table.blocks += parent_table.blocks[table.first : end]
            for block in table.held():
                block.holder_count += 1
        if parent.window_place is not None:
            full_count = token_count // self.block_size
            self.index.stand_at(child, min(full_count, parent.window_entered_count))

    # The index.

    def complete(self, sequence: Sequence, end: int, step_id: StepId) -> None:
        """Let the full blocks up to table index `end` enter the index (S10, S15).

        The step `step_id` wrote what no earlier one did.
        """
        steps = self._log.scheduled_bounds(sequence.row)
        bounds = [(step, bound // self.block_size) for step, bound in steps]
        start = sequence.window_entered_count
        self.index.stand_at(sequence, end)
        entering: list[tuple[WindowBlock, WindowPlace, StepId]] = []
        for at, place in enumerate(_chain(sequence.window_place, end - start), start):
            writing_id = next((step for step, bound in bounds if bound > at), step_id)
            for table in sequence.window_tables.values():
                block = table.blocks[at]
                # Matched blocks have their places.
                if block is not None and block.place is None:
                    entering.append((block, place, writing_id))
        self.index.enter(entering)
        self.twins.settle([block for block, _, step in entering if step == EXECUTED])

    def publish(self, step_id: StepId) -> None:
        """Say that a step was executed."""
        self.twins.settle(self.index.publish(step_id))

    # Failed steps.

    def agreed_count(self, sequence: Sequence, block_count: int) -> int:
        """Return the longest length in blocks, up to `block_count`, whose window is written and in
        the sequence's tables."""
        tables = sequence.window_tables

        def has(group_index: int, at: int) -> bool:
            block = tables[group_index].blocks[at]
            return block is not None and block not in self.index.pending

        return self.agreed_length(has, start=0, end=block_count)

    def cut(self, sequence: Sequence, block_count: int, *, now_ms: int) -> None:
        """Cut a sequence's tables."""
        if sequence.window_place is not None:
            self.index.stand_at(sequence, min(block_count, sequence.window_entered_count))
        for table in sequence.window_tables.values():
            left = [block for block in table.blocks[block_count:] if block is not None]
            left.reverse()
            del table.blocks[block_count:]
            table.first = min(table.first, block_count)
            self._leave(left, now_ms=now_ms, step_id=self._log.next_id, is_read=False)

    # Dropping content, for new use or on somebody's behalf.

    def evict(self, block: WindowBlock) -> int:
        """Give up an idle block, which left the free order, for new use; returns its id.

        One of full attention takes what is cached behind it (S19). Where a sequence is writing the
        block again, what it writes behind it stays, and has the places of what goes.
        """
        place = block.place
        assert place is not None
        block_id = self.twins.evict(block)
        if block.group_index not in self.full_groups:
            return block_id
        is_written_again = block.group_index in place.blocks
        for below in reversed(self.index.blocks_behind(place, block.group_index)):
            if below.is_linked:
                self.twins.evict(below)
                self._claims.leave_window(below)
                self._order.become_plain(below)
            elif not is_written_again:
                self.forget(below)
        return block_id

    def forget(self, block: WindowBlock) -> None:
        """Take a block and its twins out of the index; an idle one keeps its place in the free
        order (S13)."""
        for twin in twins_of(block):
            self.index.leave_twins(twin)
        self.index.leave_place(block)
        self._claims.leave_window(block)
        if block.is_linked:
            self.index.pending.pop(block, None)
            self._order.become_plain(block)


def _chain(place: WindowPlace | None, count: int) -> Iterator[WindowPlace]:
    chain: list[WindowPlace] = []
    while len(chain) < count:
        assert place is not None
        chain.append(place)
        place = place.parent
    return reversed(chain)
