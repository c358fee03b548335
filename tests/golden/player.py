"""Plays one trace on a subject and compares everything that was recorded."""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    Entry,
    ExtendEntry,
    ExtendOutcome,
    Handle,
    Identity,
    OpenEntry,
    OpenOutcome,
    Outcome,
    Refusal,
    SequenceId,
    SequencePlan,
    Step,
    StepId,
)
from tests.golden.subjects import State, Subject
from tests.golden.traces import Operation, Trace

OUT_OF_BLOCKS = ("POOL_EXHAUSTED", "SEQUENCE_EXCEEDS_POOL")
"""Reasons that the trace files write as "OOB"."""


class Difference(Exception):
    """Something differs from the record; the message says what was expected and what came."""


def differ(what: str, *, expected: object, actual: object) -> Difference:
    """Returns the error for one difference."""
    return Difference(f"{what}\n  expected: {expected}\n  actual:   {actual}")


def digest_of(state: State) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a whole state."""
    document = {
        "free_queue": list(state.free_order),
        "cached": sorted([digest, blocks] for digest, blocks in state.cached.items()),
        "ref": sorted([block, count] for block, count in state.reference_counts.items()),
        "tables": sorted([name, table] for name, table in state.tables.items()),
    }
    text = json.dumps(document, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class PlayedSequence:
    """What the driver knows of a sequence."""

    handle: Handle
    identity: Identity
    token_ids: list[int]
    known_count: int = 0
    scheduled_count: int = 0
    preemption_count: int = 0


@dataclass
class Player:
    """Plays a trace, one step per operation and an empty one to confirm it."""

    subject: Subject
    step_id: int = 0
    handle: int = 0
    sequences: dict[str, PlayedSequence] = field(default_factory=dict)

    def play(self, trace: Trace) -> None:
        """Plays a whole trace. Raises Difference at the first thing that differs."""
        for index, operation in enumerate(trace.operations):
            try:
                result = self._apply(operation)
                if result != operation.result:
                    raise differ("result", expected=operation.result, actual=result)
                self._compare_state(operation)
                self._compare_events(operation)
            except Difference as difference:
                where = f"operation {index} ({operation.name} {operation.sequence_id})"
                raise Difference(f"{where}: {difference}") from difference
        counted = self.subject.statistics()
        if counted != dict(trace.statistics):
            raise differ("counters", expected=dict(trace.statistics), actual=counted)

    def _compare_state(self, operation: Operation) -> None:
        if operation.free_order is None:
            return
        state = self.subject.state()
        if state.free_order != operation.free_order:
            raise differ("free order", expected=operation.free_order, actual=state.free_order)
        if digest_of(state) != operation.digest:
            raise differ(
                "digest of index, reference counts and tables (the free order is equal)",
                expected=operation.digest,
                actual=f"{digest_of(state)} of {state}",
            )

    def _compare_events(self, operation: Operation) -> None:
        events = self.subject.events()
        if events is None or operation.events is None:
            return
        for expected, actual in zip_longest(operation.events, events):
            if expected != actual:
                raise differ("event", expected=expected, actual=actual)

    def _apply(self, operation: Operation) -> object:
        match operation.name:
            case "new" | "resume":
                return self._open(operation)
            case "chunk" | "append":
                return self._extend(operation)
            case "free":
                return self._close(operation, CloseReason.FINISHED)
            case "preempt":
                return self._close(operation, CloseReason.PREEMPTED)
        return self.subject.flush()

    def _step(self, entry: Entry) -> Outcome:
        """Sends one entry, then an empty step that confirms it."""
        self.step_id += 2
        entry_step, empty_step = StepId(self.step_id - 1), StepId(self.step_id)
        reply = self.subject.apply(
            Step(entry_step, executed_step_id=StepId(entry_step - 1), entries=(entry,))
        )
        self.subject.apply(Step(empty_step, executed_step_id=entry_step))
        return reply.outcomes[0]

    def _open(self, operation: Operation) -> object:
        name = operation.sequence_id
        self.handle += 1
        if operation.name == "new":
            self.sequences[name] = PlayedSequence(
                Handle(self.handle), operation.identity, list(operation.token_ids)
            )
        elif name not in self.sequences:
            raise Difference("the trace resumes a sequence that it never opened")
        sequence = self.sequences[name]
        sequence.handle = Handle(self.handle)
        outcome = self._step(
            OpenEntry(
                handle=sequence.handle,
                sequence_id=SequenceId(name),
                token_ids=np.array(sequence.token_ids, np.uint32),
                identity=sequence.identity,
                schedule_token_count_max=operation.schedule_token_count_max,
                lookahead_slot_count=operation.lookahead_slot_count,
                preemption_count=sequence.preemption_count,
            )
        )
        if not isinstance(outcome, OpenOutcome):
            return refusal_of(outcome)
        sequence.known_count = len(sequence.token_ids)
        sequence.scheduled_count = outcome.plan.scheduled.end_token
        return [outcome.plan.cached.end_token, appended_blocks(outcome.plan)]

    def _extend(self, operation: Operation) -> object:
        sequence = self._sequence(operation)
        sequence.token_ids += operation.token_ids
        outcome = self._step(
            ExtendEntry(
                handle=sequence.handle,
                known_count_before=sequence.known_count,
                scheduled_count_before=sequence.scheduled_count,
                token_ids=np.array(operation.token_ids, np.uint32),
                schedule_token_count_max=operation.schedule_token_count_max,
                lookahead_slot_count=operation.lookahead_slot_count,
            )
        )
        if not isinstance(outcome, ExtendOutcome):
            return refusal_of(outcome)
        sequence.known_count += len(operation.token_ids)
        sequence.scheduled_count = outcome.plan.scheduled.end_token
        return appended_blocks(outcome.plan)

    def _close(self, operation: Operation, reason: CloseReason) -> object:
        sequence = self._sequence(operation)
        if reason is CloseReason.PREEMPTED:
            sequence.preemption_count += 1
        outcome = self._step(CloseEntry(sequence.handle, reason))
        return refusal_of(outcome) if isinstance(outcome, Refusal) else None

    def _sequence(self, operation: Operation) -> PlayedSequence:
        sequence = self.sequences.get(operation.sequence_id)
        if sequence is None:
            raise Difference("the trace names a sequence that it never opened")
        return sequence


def appended_blocks(plan: SequencePlan) -> list[int]:
    """Returns the blocks that a plan appends to its only table."""
    (group,) = plan.groups
    return [int(block) for block in group.block_ids]


def refusal_of(outcome: Outcome) -> str:
    """Returns what the trace files write for a refusal; other reasons keep their names."""
    if not isinstance(outcome, Refusal):
        return f"an outcome of another kind: {outcome}"
    return "OOB" if outcome.reason in OUT_OF_BLOCKS else outcome.reason
