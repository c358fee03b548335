"""Giving a sequence of the naive model blocks, and scheduling its positions."""

from prefixd.controller.core.messages import (
    BlockCopy,
    BlockId,
    PoolSpec,
    SequencePlan,
    TokenRange,
)
from tests.model.copies import NaiveCopies, Partial
from tests.model.naive import Matched, Refused
from tests.model.sequence import NaiveSequence


def ceil_div(numerator: int, denominator: int) -> int:
    """Rounds a quotient up."""
    return -(-numerator // denominator)


class NaiveScheduling(NaiveCopies):
    """A naive pool that plans; `budget_left` is what the step at hand may still schedule."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.budget_left: int | None = None

    def schedule(
        self,
        sequence: NaiveSequence,
        *,
        known_before: int,
        matched: Matched,
        partial: Partial | None,
        end: int,
        count_max: int | None,
        lookahead: int,
        must_fit: int = 0,
    ) -> SequencePlan:
        """Gives the sequence its matched and new blocks and schedules positions up to `end`, as
        far as its own bound and the budget allow. A partial match is given up where the pool is
        too small for it."""
        try:
            return self._schedule_behind(
                sequence, known_before, matched, partial, end, count_max, lookahead, must_fit
            )
        except Refused as refused:
            if partial is None or refused.reason != "POOL_EXHAUSTED":
                raise
        return self._schedule_behind(
            sequence, known_before, matched, None, end, count_max, lookahead, must_fit
        )

    def _schedule_behind(
        self,
        sequence: NaiveSequence,
        known_before: int,
        matched: Matched,
        partial: Partial | None,
        end: int,
        count_max: int | None,
        lookahead: int,
        must_fit: int,
    ) -> SequencePlan:
        size = sequence.block_size
        start_block = len(sequence.table)
        sources, partial_count = partial or ({}, 0)
        start = sequence.scheduled + len(matched) * size + partial_count
        count = self._allowed(max(end - start, 0), count_max)
        have = start_block + len(matched)
        new_count = max(ceil_div(start + count + lookahead, size) - have, 0)
        fit_count = ceil_div(max(start + count, must_fit) + lookahead, size)
        shared = self.shared_tails(sequence, start) if count + lookahead else []
        if shared:
            self.check_copy(sequence, shared, start)
        full_count = 1 + len(self.further_groups)
        window_new_count = new_count * (1 + len(self.windows) - full_count)
        freed = self.left_behind(sequence, min(start, known_before))
        kept = {block for blocks in (*matched, sources) for block in blocks.values()}
        self.check_supply(
            new_block_count=max(fit_count - have, 0) * full_count + window_new_count + len(shared),
            total_block_count=fit_count * full_count
            + self.window_span(start=start, end_block=have + new_count),
            kept=kept,
            gain_count=self.gain_count(freed),
        )
        cached = TokenRange(sequence.scheduled, start)
        self.free_behind(sequence, freed)
        self._hold(sequence, matched)
        copies: tuple[BlockCopy, ...] = ()
        if shared:
            copies = self.copy_tails(sequence, shared, start)
        for source in sources.values():
            self.keep_source(source)
        for table in sequence.tables():
            table.extend(self.take(new_count))
        if partial is not None:
            copies = self.copy_partial(sequence, partial, index=have)
        sequence.scheduled_by += [self.applied_step_id] * (partial_count + count)
        sequence.cut = False
        self.sequences[sequence.handle] = sequence
        if self.budget_left is not None:
            self.budget_left -= count
        if count or copies:
            sequence.planned_step_id = self.applied_step_id
            self.working_step_ids.add(self.applied_step_id)
        if sequence.planned_step_id == self.applied_step_id:
            # Lookahead slots that an entry adds behind the planned ones may be written, too.
            self.busy_blocks.update(sequence.held_blocks())
        self.complete_blocks(sequence)
        return sequence.plan(
            cached=cached,
            scheduled=TokenRange(start, start + count),
            lookahead=lookahead,
            start_block=start_block,
            copies=copies,
            freed=tuple(freed),
        )

    def _allowed(self, count: int, count_max: int | None) -> int:
        if count_max is not None:
            count = min(count, count_max)
        if self.budget_left is None:
            return count
        if count and not self.budget_left:
            raise Refused("TOKEN_BUDGET")
        return min(count, self.budget_left)

    def _hold(self, sequence: NaiveSequence, matched: Matched) -> None:
        """Puts matched blocks into the tables. What is matched is written once every group's block
        in front of it is, too."""
        self.use(matched)
        written_by = 0
        for blocks in matched:
            written_by = max(written_by, *(self.step_of_block[block] for block in blocks.values()))
            sequence.scheduled_by += [written_by] * sequence.block_size
            for group, table in enumerate(sequence.tables()):
                table.append(blocks.get(group, BlockId(0)))
