"""Carries plans over into sequences and lays out the chunks of the forward pass."""

from collections.abc import Iterable, Mapping

from prefixd.worker.plan_check import (
    PlanInvalid,
    PoolShape,
    check_fork,
    check_plan,
    check_rows,
    slot_of,
)
from prefixd.worker.sequence import Sequence, SequencePhase
from prefixd.worker.step import (
    Copy,
    Cut,
    Decoded,
    DecodeRow,
    Extend,
    Fork,
    Forked,
    Freed,
    Plan,
    PlannedChunk,
    Remap,
)


class Layout:
    """Keeps each sequence's table and counts as the controller's plans say."""

    def __init__(self, shape: PoolShape) -> None:
        self._shape = shape

    def empty_tables(self) -> tuple[list[int], ...]:
        """The tables of a sequence that holds nothing yet."""
        return tuple([] for _ in self._shape.groups)

    def rows(self, rows: tuple[DecodeRow, ...], decoded: Decoded) -> list[PlannedChunk]:
        """The chunks of the decode rows that were not deferred.

        Raises:
            PlanInvalid: a row's block contradicts its sequence's table.
        """
        by_handle = {row.handle: row for row in rows} if decoded.freed or decoded.copies else {}
        for freed in decoded.freed:
            row = by_handle.get(freed.handle)
            if row is None:
                raise PlanInvalid(f"a freed block of handle {freed.handle}, which has no row")
            self._free(row.sequence, freed, position=row.position)
        check_rows(decoded, rows, self._shape)
        self._replace_all(decoded.copies, by_handle)
        return [
            self._row(row, tuple(column[index] for column in decoded.new_block_ids))
            for index, row in enumerate(rows)
            if index not in decoded.deferred
        ]

    def plan(
        self, sequence: Sequence, plan: Plan, *, handle: int, draft_token_ids: tuple[int, ...] = ()
    ) -> list[PlannedChunk]:
        """The chunk of an open or extend, where it schedules any position.

        Raises:
            PlanInvalid: the plan contradicts the sequence.
        """
        token_ids = (*sequence.token_ids, *draft_token_ids)
        for freed in plan.freed:
            if freed.handle != handle:
                raise PlanInvalid(f"a freed block of handle {freed.handle} in another's plan")
            self._free(sequence, freed, position=plan.scheduled_start)
        for copy in plan.copies:
            # A copy of a match's last, partial block goes to one of the new blocks.
            if copy.block_index < len(self._table(sequence, copy.group_index)):
                self._replace(sequence, copy, position=plan.scheduled_start)
        check_plan(plan, sequence, handle=handle, token_count=len(token_ids), shape=self._shape)
        for table, part in zip(sequence.tables, plan.groups, strict=True):
            table.extend(part.block_ids)
        sequence.known_count = sequence.token_count
        sequence.scheduled_count = plan.scheduled_end
        sequence.is_cut = False
        sequence.shortage_count = 0
        start, end = plan.scheduled_start, plan.scheduled_end
        if start == end:
            return []
        return [
            self._chunk(sequence, start, token_ids[start:end], tuple(p.slots for p in plan.groups))
        ]

    def extend(self, extend: Extend, plan: Plan) -> list[PlannedChunk]:
        """The chunk of an extend, rejected drafts gone before.

        Raises:
            PlanInvalid: the plan contradicts the sequence.
        """
        sequence = extend.sequence
        if extend.rollback_to_token_count is not None:
            sequence.scheduled_count = extend.rollback_to_token_count
        return self.plan(
            sequence, plan, handle=extend.handle, draft_token_ids=extend.draft_token_ids
        )

    def fork(self, fork: Fork, forked: Forked) -> None:
        """Gives a new sequence the blocks that it shares.

        Raises:
            PlanInvalid: they do not hold its first tokens.
        """
        check_fork(forked.tables, token_count=fork.token_count, shape=self._shape)
        sequence = fork.sequence
        sequence.tables = tuple(map(list, forked.tables))
        sequence.known_count = sequence.scheduled_count = fork.token_count
        sequence.handle = fork.handle

    def remap(self, remaps: tuple[Remap, ...], running: Iterable[Sequence]) -> None:
        """Repoints the tables of sequences that run; those of others are given up anyway.

        Raises:
            PlanInvalid: a remap contradicts a table.
        """
        by_handle = {sequence.handle: sequence for sequence in running} if remaps else {}
        for remap in remaps:
            sequence = by_handle.get(remap.handle)
            if sequence is None:
                continue
            index = remap.block_index
            table = self._table(sequence, remap.group_index)
            if not 0 <= index < len(table) or table[index] != remap.old_block_id:
                raise PlanInvalid(f"a remap of block {remap.old_block_id}, which is not there")
            table[index] = remap.new_block_id

    def cut(self, cuts: tuple[Cut, ...], running: Iterable[Sequence]) -> None:
        """Lets the sequences that run fall back to what a failed step left of them.

        Raises:
            PlanInvalid: a cut contradicts its sequence.
        """
        by_handle = {sequence.handle: sequence for sequence in running} if cuts else {}
        for cut in cuts:
            sequence = by_handle.get(cut.handle)
            if sequence is not None:  # else it ended, and its close is on the way
                self._cut(sequence, cut)

    def _cut(self, sequence: Sequence, cut: Cut) -> None:
        if not 0 <= cut.scheduled_count <= cut.known_count <= sequence.token_count:
            raise PlanInvalid(f"a cut to {cut.scheduled_count} of {cut.known_count} known tokens")
        sequence.known_count = cut.known_count
        sequence.scheduled_count = cut.scheduled_count
        block_count = -(-cut.scheduled_count // self._shape.block_size)
        sequence.tables = tuple(table[:block_count] for table in sequence.tables)
        sequence.is_cut = True

    def _row(self, row: DecodeRow, new_block_ids: tuple[int, ...]) -> PlannedChunk:
        sequence, position = row.sequence, row.position
        for table, block_id in zip(sequence.tables, new_block_ids, strict=True):
            if block_id:
                table.append(block_id)
        sequence.known_count = sequence.scheduled_count = position + 1
        sequence.shortage_count = 0
        size = self._shape.block_size
        slots = tuple((slot_of(t, position=position, block_size=size),) for t in sequence.tables)
        return self._chunk(sequence, position, (row.token_id,), slots)

    def _replace_all(self, copies: tuple[Copy, ...], by_handle: Mapping[int, DecodeRow]) -> None:
        for copy in copies:
            row = by_handle.get(copy.handle)
            if row is None:
                raise PlanInvalid(f"a copy for handle {copy.handle}, which has no row")
            self._replace(row.sequence, copy, position=row.position)

    def _replace(self, sequence: Sequence, copy: Copy, *, position: int) -> None:
        """Puts a private copy in the place of a shared block that is about to be written."""
        index = copy.block_index
        table = self._table(sequence, copy.group_index)
        is_written = index == position // self._shape.block_size and index < len(table)
        if not is_written or table[index] != copy.source_block_id:
            raise PlanInvalid(f"a copy of block {copy.source_block_id}, which is not written")
        table[index] = copy.target_block_id

    def _free(self, sequence: Sequence, freed: Freed, *, position: int) -> None:
        """Takes a block out of a table, behind whose last position the window now begins."""
        table, index = self._table(sequence, freed.group_index), freed.block_index
        group = self._shape.groups[freed.group_index]
        first_read = group.first_read_block(position, block_size=self._shape.block_size)
        if not 0 <= index < first_read:
            raise PlanInvalid(f"block {freed.block_id} was freed, but position {position} reads it")
        if index >= len(table) or table[index] != freed.block_id:
            raise PlanInvalid(f"block {freed.block_id} was freed, which is not there")
        table[index] = 0

    @staticmethod
    def _table(sequence: Sequence, group_index: int) -> list[int]:
        if not 0 <= group_index < len(sequence.tables):
            raise PlanInvalid(f"KV group {group_index} of {len(sequence.tables)}")
        return sequence.tables[group_index]

    @staticmethod
    def _chunk(
        sequence: Sequence,
        start: int,
        token_ids: tuple[int, ...],
        slots: tuple[tuple[int, ...], ...],
    ) -> PlannedChunk:
        draft_count = max(0, start + len(token_ids) - sequence.token_count)
        if sequence.phase is SequencePhase.ENDED:
            logit_count = 0
        elif sequence.wants_prompt_logits and start < sequence.prompt_token_count:
            logit_count = len(token_ids)
        else:
            ends_sequence = start + len(token_ids) >= sequence.token_count
            logit_count = 1 + draft_count if ends_sequence else 0
        return PlannedChunk(
            sequence,
            start,
            token_ids,
            tables=tuple(map(tuple, sequence.tables)),
            slots=slots,
            logit_token_count=logit_count,
            draft_token_count=draft_count,
        )
