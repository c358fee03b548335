"""Continuous batching: what each step asks for, and what becomes of the answer.

Pure data: no grpc, no torch, no clock. The controller decides about blocks; the scheduler decides
who runs.
"""

from bisect import insort

from prefixd.worker.layout import Layout
from prefixd.worker.limits import (
    AWAIT_COUNT_MAX,
    OPENS_PER_STEP_MAX,
    SHORTAGE_COUNT_MAX,
    SchedulerLimits,
)
from prefixd.worker.plan_check import PoolShape, check_answer
from prefixd.worker.sequence import Sequence, SequencePhase
from prefixd.worker.step import (
    Applied,
    Awaiting,
    Close,
    CloseReason,
    Copy,
    Cut,
    DecodeRow,
    Extend,
    Fork,
    Forked,
    Open,
    Opened,
    PassPlan,
    PlannedChunk,
    Refused,
    Rejection,
    StepAnswer,
    StepDraft,
)


class Scheduler:
    """The waiting and the running sequences.

    Fairness: both lists stay in order of arrival. Admission is first come, first served: once a
    sequence found too few blocks, nobody behind it is tried until it is in. When blocks run out the
    latest arrival gives up its own, so the earliest always proceeds and everybody's turn comes.

    Invariants: a live sequence stands in exactly one of the two lists; `draft` and `apply`
    alternate.
    """

    def __init__(self, shape: PoolShape, limits: SchedulerLimits) -> None:
        self._shape = shape
        self._limits = limits
        self._layout = Layout(shape)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._closes: list[Close] = []
        self._forks: list[Fork] = []
        self._handle_next = 1
        self._available_block_count = 0
        # The earliest sequence that found too few blocks, and how many there were.
        self._blocked: Sequence | None = None
        self._blocked_available_block_count = 0
        self._is_short = False
        self._preemption_count = 0

    @property
    def waiting_count(self) -> int:
        """Sequences that are not open."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        """Sequences that are open."""
        return len(self._running)

    @property
    def preemption_count(self) -> int:
        """Preemptions so far."""
        return self._preemption_count

    @property
    def has_work(self) -> bool:
        """Whether a step is to be sent."""
        return bool(self._waiting or self._running or self._closes)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All live sequences."""
        return (*self._running, *self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence in."""
        assert sequence.phase is SequencePhase.WAITING
        insort(self._waiting, sequence, key=_arrival)

    def branch(self, child: Sequence, *, parent: Sequence, token_count: int) -> None:
        """Takes a sequence in that shares the first tokens of another one, and has one more.

        If it cannot share them, it waits and is opened as any other.
        """
        self.add(child)
        room = self._limits.running_sequence_count_max - len(self._running) - len(self._forks)
        is_open = parent.phase is SequencePhase.RUNNING and not parent.is_cut
        if is_open and room > 0 and token_count <= min(parent.known_count, parent.scheduled_count):
            self._forks.append(Fork(child, self._take_handle(), parent.handle, token_count))

    def end(self, sequence: Sequence, reason: CloseReason) -> None:
        """Nothing more is computed for the sequence; its blocks go back with the next step.

        Does nothing for one that has ended.
        """
        match sequence.phase:
            case SequencePhase.WAITING:
                self._waiting.remove(sequence)
            case SequencePhase.RUNNING:
                self._running.remove(sequence)
                self._closes.append(Close(sequence.handle, reason))
            case SequencePhase.OPENING | SequencePhase.ENDED:
                pass  # `apply` sees to an open that is out
        sequence.phase = SequencePhase.ENDED
        if self._blocked is sequence:
            self._blocked = None

    def begin_epoch(self) -> None:
        """The controller knows nothing of us any more: every live sequence waits again."""
        live = [s for s in self.sequences if s.phase is not SequencePhase.ENDED]
        for sequence in live:
            sequence.forget_controller_state()
        self._waiting = sorted(live, key=_arrival)
        self._running = []
        self._closes = []
        self._forks = []
        self._handle_next = 1
        self._blocked = None
        self._is_short = False

    def draft(self) -> StepDraft:
        """Decides on the next step: closes, decode rows, next chunks, then admissions."""
        was_short = self._is_short
        self._is_short = False
        if was_short and not self._closes and len(self._running) > 1:
            self._preempt(self._running[-1])
        forks = self._take_forks()
        closes = self.take_closes()
        # Guesses would take blocks that others lack.
        guesses = {} if was_short else self._guesses()
        decode_rows = tuple(
            DecodeRow(s, s.handle, s.scheduled_count, s.token_ids[-1])
            for s in self._running
            if s.is_decoding and s not in guesses
        )
        decode_rows += tuple(
            DecodeRow(f.sequence, f.handle, f.token_count, f.sequence.token_ids[-1]) for f in forks
        )
        budget = self._limits.token_budget - len(decode_rows)
        assert budget > 0, "the limits leave room for prefill"
        extends = self._draft_extends(guesses, budget)
        budget -= sum(extend.schedule_token_count_max for extend in extends)
        can_open = not was_short and budget > 0
        draft = StepDraft(
            forks=forks,
            closes=closes,
            decode_rows=decode_rows,
            extends=extends,
            opens=self._draft_opens(has_closes=bool(closes)) if can_open else (),
            token_budget=self._limits.token_budget,
        )
        if draft.is_empty and self._running:
            # All that run wait for others of their request, which find no blocks.
            self._preempt(self._running[-1])
            return self.draft()
        return draft

    def _take_forks(self) -> tuple[Fork, ...]:
        """The forks of sequences that are still wanted; from now on they are on their way."""
        forks = tuple(f for f in self._forks if f.sequence.phase is SequencePhase.WAITING)
        self._forks = []
        for fork in forks:
            fork.sequence.phase = SequencePhase.OPENING
        return forks

    def take_closes(self) -> tuple[Close, ...]:
        """Hands over the closes that are due: each is sent once."""
        closes, self._closes = tuple(self._closes), []
        return closes

    def apply(self, draft: StepDraft, answer: StepAnswer) -> Applied:
        """Takes the controller's answer over and lays out the forward pass.

        Every plan is laid out, also of a sequence that has ended since: others may read its blocks.

        Raises:
            PlanInvalid: a plan contradicts what we know. The epoch must end.
        """
        check_answer(answer, draft)
        self._available_block_count = answer.available_block_count
        self._layout.remap(answer.remaps, self._running)
        self.apply_cuts(answer.cuts)
        rejections: list[Rejection] = []
        for fork, forked in zip(draft.forks, answer.forks, strict=True):
            self._apply_fork(fork, forked)
        copies: list[Copy] = list(answer.decoded.copies)
        chunks = self._layout.rows(draft.decode_rows, answer.decoded)
        for index, reason in answer.decoded.deferred.items():
            self._apply_refusal(draft.decode_rows[index].sequence, Refused(reason), rejections)
        for extend, extended in zip(draft.extends, answer.extends, strict=True):
            if isinstance(extended, Refused):
                self._apply_refusal(extend.sequence, extended, rejections)
            else:
                chunks += self._layout.extend(extend, extended.plan)
                copies += extended.plan.copies
        opened: list[tuple[Sequence, int]] = []
        for entry, outcome in zip(draft.opens, answer.opens, strict=True):
            if isinstance(outcome, Opened):
                is_first = not entry.sequence.was_opened
                chunks += self._apply_open(entry, outcome)
                copies += outcome.plan.copies
                if is_first:
                    opened.append((entry.sequence, outcome.cached_token_count))
            else:
                self._apply_no_open(entry.sequence, outcome, rejections)
        return Applied(PassPlan(tuple(chunks), tuple(copies)), tuple(opened), tuple(rejections))

    def _guesses(self) -> dict[Sequence, tuple[int, ...]]:
        """What may follow the sequences that have one token left to compute."""
        guesses = {
            sequence: sequence.lookup.propose(sequence.token_ids)
            for sequence in self._running
            if sequence.lookup is not None and sequence.unscheduled_token_count == 1
        }
        return {sequence: draft for sequence, draft in guesses.items() if draft}

    def _draft_extends(
        self, guesses: dict[Sequence, tuple[int, ...]], budget: int
    ) -> tuple[Extend, ...]:
        extends: list[Extend] = []
        # Answers that grow come before prompts, as decode rows do.
        for sequence in sorted(self._running, key=lambda s: s.unscheduled_token_count > 1):
            draft = guesses.get(sequence, ())
            wanted = sequence.unscheduled_token_count + len(draft)
            if wanted == 0 or (sequence.is_decoding and not draft):
                continue
            count = min(self._limits.chunk_token_count_max, wanted, budget)
            if count < 1:
                break
            budget -= count
            extends.append(
                Extend(
                    sequence,
                    sequence.handle,
                    known_count_before=sequence.known_count,
                    scheduled_count_before=sequence.scheduled_count,
                    token_ids=tuple(sequence.token_ids[sequence.known_count :]),
                    schedule_token_count_max=count,
                    draft_token_ids=draft,
                    rollback_to_token_count=sequence.rollback_to_token_count,
                )
            )
        return tuple(extends)

    def _draft_opens(self, *, has_closes: bool) -> tuple[Open, ...]:
        may_fit = (
            has_closes
            or not self._running
            or self._available_block_count > self._blocked_available_block_count
        )
        if self._blocked is not None and not may_fit:
            return ()
        opens: list[Open] = []
        # Forks that are on their way take room, too.
        fork_count = sum(s.phase is SequencePhase.OPENING for s in self._waiting)
        room = self._limits.running_sequence_count_max - len(self._running) - fork_count
        waiting = [s for s in self._waiting if s.phase is SequencePhase.WAITING]
        for sequence in waiting[: max(0, min(room, OPENS_PER_STEP_MAX))]:
            opens.append(self._draft_open(sequence))
            if sequence is self._blocked:
                break
        return tuple(opens)

    def _take_handle(self) -> int:
        handle = self._handle_next
        self._handle_next += 1
        return handle

    def _draft_open(self, sequence: Sequence) -> Open:
        sequence.phase = SequencePhase.OPENING
        handle = self._take_handle()
        # Room for a block of growth beside each running sequence: without it a sequence that just
        # fits would be preempted at once by the next one that grows.
        growth = self._shape.block_size * len(self._running)
        chunk_count_max = self._limits.chunk_token_count_max
        fitting_count_max = self._shape.token_count_max(chunk_token_count_max=chunk_count_max)
        must_fit = min(sequence.token_count + growth, fitting_count_max)
        can_await = not sequence.skip_cache_read and sequence.await_count < AWAIT_COUNT_MAX
        return Open(
            sequence,
            handle,
            token_ids=tuple(sequence.token_ids),
            schedule_token_count_max=chunk_count_max,
            must_fit_token_count=must_fit,
            await_token_count_min=self._shape.await_token_count_min if can_await else 0,
        )

    def apply_cuts(self, cuts: tuple[Cut, ...]) -> None:
        """Lets the sequences fall back to what a failed step left of them."""
        self._layout.cut(cuts, self._running)

    def _apply_open(self, entry: Open, outcome: Opened) -> list[PlannedChunk]:
        sequence = entry.sequence
        sequence.tables = self._layout.empty_tables()
        chunks = self._layout.plan(sequence, outcome.plan, handle=entry.handle)
        sequence.handle = entry.handle
        sequence.was_opened = True
        sequence.await_count = 0
        self._admit(sequence, entry.handle)
        return chunks

    def _admit(self, sequence: Sequence, handle: int) -> None:
        """The sequence is open now."""
        self._waiting.remove(sequence)
        if sequence is self._blocked:
            self._blocked = None
        if sequence.phase is SequencePhase.ENDED:
            self._closes.append(Close(handle, CloseReason.ABORTED))
        else:
            sequence.phase = SequencePhase.RUNNING
            insort(self._running, sequence, key=_arrival)

    def _apply_fork(self, fork: Fork, forked: Forked | Refused) -> None:
        sequence = fork.sequence
        is_wanted = sequence.phase is not SequencePhase.ENDED
        if isinstance(forked, Refused):
            if is_wanted:
                sequence.phase = SequencePhase.WAITING
            else:
                self._waiting.remove(sequence)
            return
        self._layout.fork(fork, forked)
        self._admit(sequence, fork.handle)

    def _apply_no_open(
        self, sequence: Sequence, outcome: Refused | Awaiting, rejections: list[Rejection]
    ) -> None:
        if sequence.phase is SequencePhase.ENDED:
            self._waiting.remove(sequence)
            return
        sequence.phase = SequencePhase.WAITING
        if isinstance(outcome, Awaiting):
            sequence.await_count += 1
            return
        if outcome.reason == "TOKEN_BUDGET":
            return
        if outcome.reason != "POOL_EXHAUSTED":
            self._reject(sequence, outcome, rejections)
            return
        if self._blocked is None or _arrival(sequence) < _arrival(self._blocked):
            self._blocked = sequence
        self._blocked_available_block_count = self._available_block_count
        if not self._running:
            self._count_shortage(sequence, rejections)

    def _apply_refusal(
        self, sequence: Sequence, refused: Refused, rejections: list[Rejection]
    ) -> None:
        passing = {"TOKEN_BUDGET", "COPY_IN_SAME_STEP"}
        # The row of a fork that was refused finds no sequence; its own waits to be opened.
        if sequence.phase is not SequencePhase.RUNNING or refused.reason in passing:
            return
        if refused.reason == "POOL_EXHAUSTED":
            self._is_short = True
            if len(self._running) == 1:
                self._count_shortage(sequence, rejections)
            return
        self._reject(sequence, refused, rejections)

    def _count_shortage(self, sequence: Sequence, rejections: list[Rejection]) -> None:
        sequence.shortage_count += 1
        if sequence.shortage_count >= SHORTAGE_COUNT_MAX:
            message = "no block is to be had although nothing else of this worker runs"
            self._reject(sequence, Refused("POOL_EXHAUSTED", message), rejections)

    def _reject(self, sequence: Sequence, refused: Refused, rejections: list[Rejection]) -> None:
        self.end(sequence, CloseReason.ABORTED)
        message = refused.message or f"the controller refused to go on: {refused.reason}"
        rejections.append(Rejection(sequence, refused.reason, message, refused.numbers))

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._closes.append(Close(sequence.handle, CloseReason.PREEMPTED))
        sequence.forget_controller_state()
        sequence.preemption_count += 1
        self._preemption_count += 1
        insort(self._waiting, sequence, key=_arrival)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
