"""The naive model's log of steps: the core's messages in, the core's replies out."""

import numpy as np

from prefixd.controller.core.messages import (
    AwaitPrefix,
    BlockCopy,
    BlockId,
    BlockRemap,
    CloseEntry,
    CloseOutcome,
    CutSequence,
    DecodeEntry,
    DecodeOutcome,
    DeferredRow,
    Entry,
    ExtendEntry,
    ExtendOutcome,
    ForkEntry,
    ForkOutcome,
    Handle,
    OpenEntry,
    OpenOutcome,
    Outcome,
    PoolSpec,
    PrefixMatch,
    Refusal,
    SequenceId,
    SequencePlan,
    Step,
    StepId,
    StepReply,
    TokenRange,
)
from tests.model.copies import NaiveCopies
from tests.model.naive import Refused
from tests.model.sequence import NaiveSequence


def ceil_div(numerator: int, denominator: int) -> int:
    """Rounds a quotient up."""
    return -(-numerator // denominator)


class NaiveLog(NaiveCopies):
    """A naive pool that is changed by numbered steps."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.replies: dict[int, StepReply] = {}
        self._budget_left: int | None = None
        self._outcomes: list[Outcome] = []
        self._cut: tuple[CutSequence, ...] = ()
        self._remaps: tuple[BlockRemap, ...] = ()

    def apply_step(self, step: Step) -> StepReply:
        """Applies a well-formed step, or gives the kept reply of a known one."""
        if step.step_id in self.replies:
            return self.replies[step.step_id]
        self.begin_step(step)
        for entry in step.entries:
            self.add_entry(entry)
        return self.finish_step()

    def begin_step(self, step: Step) -> None:
        """Takes in what a step says beside its entries."""
        assert step.step_id == self.applied_step_id + 1
        self.busy_blocks, self.left_blocks, self.target_blocks = set(), set(), set()
        self._budget_left = step.token_budget
        self._outcomes = []
        self.lapse()
        for executed in range(self.executed_step_id + 1, step.executed_step_id + 1):
            self.executed_step_id = executed
            self.settle_twins()
        self.settled_step_id = max(self.settled_step_id, self.executed_step_id)
        self._remaps = self.merge_twins() if self.spec.merge_duplicates else ()
        self._cut = ()
        if step.failed is not None:
            self._cut = self._fail()
            self.settled_step_id = step.failed.last_step_id
        self.applied_step_id = step.step_id

    def add_entry(self, entry: Entry) -> Outcome:
        """Applies one entry of the step that was begun."""
        outcome = self._outcome(entry)
        self._outcomes.append(outcome)
        return outcome

    def finish_step(self) -> StepReply:
        """Answers the step that was begun."""
        self.delay_behind_later_blocks()
        step_id = StepId(self.applied_step_id)
        reply = StepReply(step_id, tuple(self._outcomes), self._cut, len(self.free), self._remaps)
        self.replies[step_id] = reply
        for known in [known for known in self.replies if known <= self.settled_step_id]:
            del self.replies[known]
        return reply

    def _fail(self) -> tuple[CutSequence, ...]:
        return tuple(
            CutSequence(handle, self.sequences[handle].known, self.sequences[handle].scheduled)
            for handle in self.cut_tables()
        )

    def _outcome(self, entry: Entry) -> Outcome:
        try:
            match entry:
                case OpenEntry():
                    return self._open(entry)
                case ExtendEntry():
                    return self._extend(entry)
                case CloseEntry():
                    return self._close(entry)
                case ForkEntry():
                    return self._fork(entry)
                case DecodeEntry():
                    return self._decode(entry)
        except Refused as refused:
            return Refusal(refused.reason, "", tuple(sorted(refused.numbers.items())))

    def _open(self, entry: OpenEntry) -> Outcome:
        self._check_names(entry.handle, entry.sequence_id)
        sequence = NaiveSequence(
            handle=entry.handle,
            sequence_id=entry.sequence_id,
            identity=entry.identity,
            version=self.model_version,
            block_size=self.spec.block_size,
            cacheable=not (self.spec.caching_disabled or entry.identity.has_unknown_fields),
            skip_cache_read=entry.skip_cache_read,
            preemption_count=entry.preemption_count,
            token_ids=[int(token) for token in entry.token_ids],
            retention_hint=entry.retention_hint,
        )
        matched = self._readable_blocks(sequence)
        partial = self._readable_partial(sequence, matched)
        match = self.match_with(matched, partial)
        awaiting = self._await(entry, sequence, match)
        if awaiting is not None:
            return awaiting
        plan = self._schedule(
            sequence,
            matched=matched,
            partial=partial,
            end=sequence.known,
            count_max=entry.schedule_token_count_max,
            lookahead=entry.lookahead_slot_count,
            must_fit=entry.must_fit_token_count,
        )
        if not plan.copies:
            match = self.match_of(matched)
        sequence.cached_count = match.published_token_count + match.pending_token_count
        if sequence.cacheable and not entry.skip_cache_read:
            count = (
                self.statistics.count_reopen
                if entry.preemption_count
                else self.statistics.count_open
            )
            count(query_token_count=sequence.known, hit_token_count=sequence.cached_count)
        return OpenOutcome(plan, match.published_token_count, match.pending_token_count)

    def _check_names(self, handle: Handle, sequence_id: SequenceId) -> None:
        if handle in self.sequences or any(
            sequence.sequence_id == sequence_id for sequence in self.sequences.values()
        ):
            raise Refused("SEQUENCE_EXISTS")

    def _fork(self, entry: ForkEntry) -> Outcome:
        parent = self.sequences.get(entry.parent_handle)
        if parent is None:
            raise Refused("SEQUENCE_NOT_FOUND")
        self._check_names(entry.child_handle, entry.child_sequence_id)
        if entry.token_count > min(parent.known, parent.scheduled):
            raise Refused("POSITION_MISMATCH")
        child = parent.fork(entry)
        self.sequences[child.handle] = child
        cached = TokenRange(0, entry.token_count)
        nothing = TokenRange(entry.token_count, entry.token_count)
        return ForkOutcome(child.plan(cached=cached, scheduled=nothing, lookahead=0, start_block=0))

    def _readable_blocks(self, sequence: NaiveSequence) -> list[BlockId]:
        if not sequence.cacheable or sequence.skip_cache_read:
            return []
        return self.matched_blocks(sequence.token_ids, sequence.identity)

    def _readable_partial(
        self, sequence: NaiveSequence, matched: list[BlockId]
    ) -> tuple[BlockId, int] | None:
        if not sequence.cacheable or sequence.skip_cache_read:
            return None
        return self.partial(
            sequence.token_ids, sequence.identity, matched, step_id=self.applied_step_id
        )

    def _await(
        self, entry: OpenEntry, sequence: NaiveSequence, match: PrefixMatch
    ) -> AwaitPrefix | None:
        if not entry.await_token_count_min or not sequence.cacheable or entry.skip_cache_read:
            return None
        found = self.awaitable(
            sequence.token_ids,
            sequence.identity,
            matched_token_count=match.published_token_count + match.pending_token_count,
        )
        if found is None or found[0] < entry.await_token_count_min:
            return None
        return AwaitPrefix(
            match.published_token_count, match.pending_token_count, found[0], found[1]
        )

    def _schedule(
        self,
        sequence: NaiveSequence,
        *,
        matched: list[BlockId],
        partial: tuple[BlockId, int] | None = None,
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
                sequence, matched, partial, end, count_max, lookahead, must_fit
            )
        except Refused as refused:
            if partial is None or refused.reason != "POOL_EXHAUSTED":
                raise
        return self._schedule_behind(sequence, matched, None, end, count_max, lookahead, must_fit)

    def _schedule_behind(
        self,
        sequence: NaiveSequence,
        matched: list[BlockId],
        partial: tuple[BlockId, int] | None,
        end: int,
        count_max: int | None,
        lookahead: int,
        must_fit: int,
    ) -> SequencePlan:
        size = sequence.block_size
        start_block = len(sequence.table)
        source, partial_count = partial or (None, 0)
        start = sequence.scheduled + len(matched) * size + partial_count
        count = max(end - start, 0)
        if count_max is not None:
            count = min(count, count_max)
        if self._budget_left is not None:
            if count and not self._budget_left:
                raise Refused("TOKEN_BUDGET")
            count = min(count, self._budget_left)
        slot_count = max(start + count, must_fit) + lookahead
        have = start_block + len(matched)
        shared = self.shared_tail(sequence, start) if count + lookahead else None
        if shared is not None:
            self.check_copy(sequence, shared, start)
        self.check_supply(
            new_block_count=max(ceil_div(slot_count, size) - have, 0) + (shared is not None),
            total_block_count=ceil_div(slot_count, size),
            matched=matched if source is None else [*matched, source],
        )
        cached = TokenRange(sequence.scheduled, start)
        self.use(matched)
        for block in matched:
            sequence.scheduled_by += [self.step_of_block[block]] * size
        sequence.table += matched
        copies: tuple[BlockCopy, ...] = ()
        if shared is not None:
            own = self.replace_shared(sequence, shared)
            copies = (BlockCopy(sequence.handle, 0, shared, own, start % size, start // size),)
        if source is not None:
            self.keep_source(source)
        new_blocks = self.take(max(ceil_div(start + count + lookahead, size) - have, 0))
        if source is not None:
            own = new_blocks[0]
            copies = (BlockCopy(sequence.handle, 0, source, own, partial_count, start // size),)
            self.target_blocks.add(own)
        sequence.table += new_blocks
        sequence.scheduled_by += [self.applied_step_id] * (partial_count + count)
        sequence.cut = False
        self.sequences[sequence.handle] = sequence
        if self._budget_left is not None:
            self._budget_left -= count
        if count or copies:
            sequence.planned_step_id = self.applied_step_id
            self.busy_blocks.update(sequence.table)
            self.working_step_ids.add(self.applied_step_id)
        self.complete_blocks(sequence)
        return sequence.plan(
            cached=cached,
            scheduled=TokenRange(start, start + count),
            lookahead=lookahead,
            start_block=start_block,
            copies=copies,
        )

    def _sequence_at(
        self, handle: Handle, *, known_before: int, scheduled_before: int
    ) -> NaiveSequence:
        sequence = self.sequences.get(handle)
        if sequence is None:
            raise Refused("SEQUENCE_NOT_FOUND")
        if (known_before, scheduled_before) != (sequence.known, sequence.scheduled):
            raise Refused("POSITION_MISMATCH")
        return sequence

    def _extend(self, entry: ExtendEntry) -> Outcome:
        sequence = self._sequence_at(
            entry.handle,
            known_before=entry.known_count_before,
            scheduled_before=entry.scheduled_count_before,
        )
        before = (list(sequence.token_ids), list(sequence.scheduled_by))
        sequence.token_ids += [int(token) for token in entry.token_ids]
        if entry.rollback_to_token_count is not None:
            del sequence.scheduled_by[entry.rollback_to_token_count :]
        matched: list[BlockId] = []
        partial = None
        if sequence.cut:
            readable = self._readable_blocks(sequence)
            matched = readable[len(sequence.table) :]
            if len(readable) >= len(sequence.table):
                partial = self._readable_partial(sequence, readable)
        try:
            plan = self._schedule(
                sequence,
                matched=matched,
                partial=partial,
                end=sequence.known + entry.draft_token_count,
                count_max=entry.schedule_token_count_max,
                lookahead=entry.lookahead_slot_count,
            )
        except Refused:
            sequence.token_ids, sequence.scheduled_by = before
            raise
        return ExtendOutcome(plan)

    def _close(self, entry: CloseEntry) -> Outcome:
        sequence = self.sequences.pop(entry.handle, None)
        if sequence is None:
            raise Refused("SEQUENCE_NOT_FOUND")
        if sequence.planned_step_id == self.applied_step_id:
            self.left_blocks.update(sequence.table)
        self.close(sequence, entry.retention_hint or sequence.retention_hint, entry.reason)
        self.release(sequence, kept_block_count=0)
        return CloseOutcome()

    def _decode(self, entry: DecodeEntry) -> Outcome:
        new_blocks: list[int] = []
        copies: list[BlockCopy] = []
        deferred: list[DeferredRow] = []
        offset = 0
        for row, handle in enumerate(entry.handles):
            count = int(entry.token_counts[row])
            token_ids = [int(token) for token in entry.token_ids[offset : offset + count]]
            offset += count
            try:
                new_block, row_copies = self._decode_row(
                    Handle(int(handle)),
                    known_before=int(entry.known_count_before[row]),
                    scheduled_before=int(entry.scheduled_count_before[row]),
                    token_ids=token_ids,
                )
                new_blocks.append(new_block)
                copies += row_copies
            except Refused as refused:
                new_blocks.append(0)
                deferred.append(
                    DeferredRow(
                        row,
                        refused.reason,
                        refused.numbers.get("needed_count", 0),
                        refused.numbers.get("available_count", 0),
                    )
                )
        column = np.array(new_blocks, np.int64)
        return DecodeOutcome((column,), tuple(deferred), tuple(copies))

    def _decode_row(
        self, handle: Handle, *, known_before: int, scheduled_before: int, token_ids: list[int]
    ) -> tuple[int, tuple[BlockCopy, ...]]:
        sequence = self._sequence_at(
            handle, known_before=known_before, scheduled_before=scheduled_before
        )
        if sequence.cut:
            raise Refused("POSITION_MISMATCH")
        table_before = len(sequence.table)
        sequence.token_ids += token_ids
        try:
            plan = self._schedule(
                sequence, matched=[], end=sequence.scheduled + 1, count_max=1, lookahead=0
            )
        except Refused:
            del sequence.token_ids[known_before:]
            raise
        appended = sequence.table[table_before:]
        return (appended[0] if appended else 0), plan.copies
