"""Carries plans over into sequences and lays out the chunks of the forward pass."""

from prefixd.worker.plan_check import PlanInvalid, PoolShape, check_plan, check_rows, slot_of
from prefixd.worker.sequence import Sequence, SequencePhase
from prefixd.worker.step import Cut, Decoded, DecodeRow, Extend, Plan, PlannedChunk


class Layout:
    """Keeps each sequence's table and counts as the controller's plans say."""

    def __init__(self, shape: PoolShape) -> None:
        self._shape = shape

    def rows(self, rows: tuple[DecodeRow, ...], decoded: Decoded) -> list[PlannedChunk]:
        """The chunks of the decode rows that were not deferred.

        Raises:
            PlanInvalid: a row's block contradicts its sequence's table.
        """
        check_rows(decoded, rows, self._shape)
        return [
            self._row(row, block_id)
            for index, (row, block_id) in enumerate(zip(rows, decoded.new_block_ids, strict=True))
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
        check_plan(plan, sequence, handle=handle, token_count=len(token_ids), shape=self._shape)
        sequence.block_ids += plan.block_ids
        sequence.known_count = sequence.token_count
        sequence.scheduled_count = plan.scheduled_end
        sequence.is_cut = False
        sequence.shortage_count = 0
        start, end = plan.scheduled_start, plan.scheduled_end
        if start == end:
            return []
        return [self._chunk(sequence, start, token_ids[start:end], plan.slots)]

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

    def cut(self, sequence: Sequence, cut: Cut) -> None:
        """Lets a sequence fall back to what a failed step left of it.

        Raises:
            PlanInvalid: the cut contradicts the sequence.
        """
        if not 0 <= cut.scheduled_count <= cut.known_count <= sequence.token_count:
            raise PlanInvalid(f"a cut to {cut.scheduled_count} of {cut.known_count} known tokens")
        sequence.known_count = cut.known_count
        sequence.scheduled_count = cut.scheduled_count
        block_count = -(-cut.scheduled_count // self._shape.block_size)
        sequence.block_ids = sequence.block_ids[:block_count]
        sequence.is_cut = True

    def _row(self, row: DecodeRow, block_id: int) -> PlannedChunk:
        sequence, position = row.sequence, row.position
        if block_id:
            sequence.block_ids.append(block_id)
        sequence.known_count = sequence.scheduled_count = position + 1
        sequence.shortage_count = 0
        slot = slot_of(sequence.block_ids, position=position, block_size=self._shape.block_size)
        return self._chunk(sequence, position, (row.token_id,), (slot,))

    @staticmethod
    def _chunk(
        sequence: Sequence, start: int, token_ids: tuple[int, ...], slots: tuple[int, ...]
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
            block_ids=tuple(sequence.block_ids),
            slots=slots,
            logit_token_count=logit_count,
            draft_token_count=draft_count,
        )
