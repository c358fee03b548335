"""The naive model's log of steps: the core's messages in, the core's replies out."""

import numpy as np

from prefixd.controller.core.messages import (
    AwaitPrefix,
    BlockCopy,
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
    FreedBlock,
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
from tests.model.copies import Partial
from tests.model.naive import Matched, Refused
from tests.model.scheduling import NaiveScheduling
from tests.model.sequence import NaiveSequence


class NaiveLog(NaiveScheduling):
    """A naive pool that is changed by numbered steps."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.replies: dict[int, StepReply] = {}
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
        self.budget_left = step.token_budget
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
            window_tables={group: [] for group in self.windows},
            retention_hint=entry.retention_hint,
        )
        matched = self._readable_blocks(sequence)
        partial = self._readable_partial(sequence, matched)
        match = self.match_with(matched, partial)
        awaiting = self._await(entry, sequence, match)
        if awaiting is not None:
            return awaiting
        plan = self.schedule(
            sequence,
            known_before=0,
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
        if not self.has_window(parent, entry.token_count):
            raise Refused("POSITION_MISMATCH")
        child = parent.fork(entry)
        self.share_windows(parent, child)
        self.sequences[child.handle] = child
        cached = TokenRange(0, entry.token_count)
        nothing = TokenRange(entry.token_count, entry.token_count)
        return ForkOutcome(child.plan(cached=cached, scheduled=nothing, lookahead=0, start_block=0))

    def _readable_blocks(self, sequence: NaiveSequence) -> Matched:
        if not sequence.cacheable or sequence.skip_cache_read:
            return []
        return self.matched_blocks(
            sequence.token_ids, sequence.identity, own_count=len(sequence.table)
        )

    def _readable_partial(self, sequence: NaiveSequence, matched: Matched) -> Partial | None:
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
        matched: Matched = []
        partial = None
        if sequence.cut:
            readable = self._readable_blocks(sequence)
            matched = readable[len(sequence.table) :]
            if len(readable) >= len(sequence.table):
                partial = self._readable_partial(sequence, readable)
        try:
            plan = self.schedule(
                sequence,
                known_before=entry.known_count_before,
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
            self.left_blocks.update(sequence.held_blocks())
        self.close(sequence, entry.retention_hint or sequence.retention_hint, entry.reason)
        self.release(sequence, kept_block_count=0)
        return CloseOutcome()

    def _decode(self, entry: DecodeEntry) -> Outcome:
        columns = [np.zeros(len(entry.handles), np.int64) for _ in self.spec.groups]
        copies: list[BlockCopy] = []
        freed: list[FreedBlock] = []
        deferred: list[DeferredRow] = []
        offset = 0
        for row, handle in enumerate(entry.handles):
            count = int(entry.token_counts[row])
            token_ids = [int(token) for token in entry.token_ids[offset : offset + count]]
            offset += count
            try:
                plan = self._decode_row(
                    Handle(int(handle)),
                    known_before=int(entry.known_count_before[row]),
                    scheduled_before=int(entry.scheduled_count_before[row]),
                    token_ids=token_ids,
                )
            except Refused as refused:
                needed_count = refused.numbers.get("needed_count", 0)
                available_count = refused.numbers.get("available_count", 0)
                deferred.append(DeferredRow(row, refused.reason, needed_count, available_count))
                continue
            for column, group in zip(columns, plan.groups, strict=True):
                column[row] = sum(group.block_ids)
            copies += plan.copies
            freed += plan.freed_blocks
        return DecodeOutcome(tuple(columns), tuple(deferred), tuple(copies), tuple(freed))

    def _decode_row(
        self, handle: Handle, *, known_before: int, scheduled_before: int, token_ids: list[int]
    ) -> SequencePlan:
        sequence = self._sequence_at(
            handle, known_before=known_before, scheduled_before=scheduled_before
        )
        if sequence.cut:
            raise Refused("POSITION_MISMATCH")
        sequence.token_ids += token_ids
        try:
            return self.schedule(
                sequence,
                known_before=known_before,
                matched=[],
                partial=None,
                end=sequence.scheduled + 1,
                count_max=1,
                lookahead=0,
            )
        except Refused:
            del sequence.token_ids[known_before:]
            raise
