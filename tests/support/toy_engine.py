"""A deterministic engine on the bare step protocol, for tests of the protocol itself.

Its "model" reads the tokens it stored in the slots of its block tables and derives the next token
from them; so a wrong slot, a wrong table or a lost write shows at once.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixd.v1 import cache_pb2, types_pb2
from tests.support.driver import close_entry, decode_entry, extend_entry, open_entry

Send = Callable[[cache_pb2.StepRequest], cache_pb2.StepResponse]

VOCABULARY_SIZE = 97
CHUNK_TOKEN_COUNT = 6


@dataclass(frozen=True)
class Job:
    """A prompt that arrives before a given round and wants some tokens of an answer."""

    name: str
    prompt: tuple[int, ...]
    answer_count: int
    arrival: int = 0
    cache_salt: str = ""
    preempted_after: int | None = None


@dataclass
class Sequence:
    """The engine's side of an open sequence; `told` and `scheduled` are the controller's counts."""

    job: Job
    handle: int
    tokens: list[int]
    told: int = 0
    scheduled: int = 0
    is_cut: bool = False
    table: list[int] = field(default_factory=list)
    preemption_count: int = 0

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        return tuple(self.tokens[len(self.job.prompt) :])

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        return len(self.answer) >= self.job.answer_count


class ToyEngine:
    """Runs jobs to their end, one step per round; rounds named in `failing` are not executed."""

    def __init__(
        self, jobs: tuple[Job, ...], send: Send, *, block_size: int, failing: frozenset[int]
    ) -> None:
        self.answers: dict[str, tuple[int, ...]] = {}
        self.responses: list[cache_pb2.StepResponse] = []
        self._waiting = [(job, 0, list(job.prompt)) for job in jobs]
        self._send = send
        self._block_size = block_size
        self._failing = failing
        self._running: dict[int, Sequence] = {}
        self._kv: dict[int, int] = {}
        self._handle_next = 1
        self._step_id = 0
        self._executed_step_id = 0
        self._is_failed = False

    def run(self) -> None:
        """Goes on until every job has its answer and every step is confirmed."""
        while self._waiting or self._running:
            self._round()
        self._round()
        self._round()

    def _round(self) -> None:
        entries, sequences = self._entries()
        self._step_id += 1
        request = cache_pb2.StepRequest(
            step_id=self._step_id, executed_step_id=self._executed_step_id, entries=entries
        )
        if self._is_failed:
            request.failed_step_id = request.failed_step_id_last = self._step_id - 1
        response = self._send(request)
        self.responses.append(response)
        for cut in response.cut_sequences:
            self._cut(cut)
        scheduled = self._take_plans(entries, sequences, response)
        self._is_failed = self._step_id in self._failing
        if not self._is_failed:
            self._execute(scheduled)
            self._executed_step_id = self._step_id

    def _entries(self) -> tuple[list[cache_pb2.StepEntry], list[list[Sequence]]]:
        entries: list[cache_pb2.StepEntry] = []
        sequences: list[list[Sequence]] = []

        def add(entry: cache_pb2.StepEntry, *of: Sequence) -> None:
            entries.append(entry)
            sequences.append(list(of))

        for sequence in [one for one in self._running.values() if self._leaves(one)]:
            del self._running[sequence.handle]
            add(close_entry(sequence.handle, self._close_reason(sequence)))
        decoding = [one for one in self._running.values() if self._decodes(one)]
        if decoding:
            rows = ((one.handle, one.scheduled, one.tokens[one.told]) for one in decoding)
            add(decode_entry(*rows), *decoding)
        for sequence in self._running.values():
            if sequence not in decoding:
                add(self._extend(sequence), sequence)
        for waiting in [one for one in self._waiting if one[0].arrival <= self._step_id]:
            self._waiting.remove(waiting)
            sequence = self._open(*waiting)
            add(self._open_entry(sequence), sequence)
        return entries, sequences

    def _leaves(self, sequence: Sequence) -> bool:
        if sequence.is_done:
            self.answers[sequence.job.name] = sequence.answer
            return True
        if sequence.preemption_count == 0 and len(sequence.answer) == sequence.job.preempted_after:
            self._waiting.insert(0, (sequence.job, 1, list(sequence.tokens)))
            return True
        return False

    def _close_reason(self, sequence: Sequence) -> types_pb2.CloseReason.ValueType:
        if sequence.is_done:
            return types_pb2.CLOSE_REASON_FINISHED
        return types_pb2.CLOSE_REASON_PREEMPTED

    def _decodes(self, sequence: Sequence) -> bool:
        return (
            not sequence.is_cut and sequence.scheduled == sequence.told == len(sequence.tokens) - 1
        )

    def _extend(self, sequence: Sequence) -> cache_pb2.StepEntry:
        return extend_entry(
            sequence.handle,
            known=sequence.told,
            scheduled=sequence.scheduled,
            token_ids=sequence.tokens[sequence.told :],
            schedule_token_count_max=CHUNK_TOKEN_COUNT,
        )

    def _open(self, job: Job, preemption_count: int, tokens: list[int]) -> Sequence:
        sequence = Sequence(job, self._handle_next, tokens, preemption_count=preemption_count)
        self._handle_next += 1
        self._running[sequence.handle] = sequence
        return sequence

    def _open_entry(self, sequence: Sequence) -> cache_pb2.StepEntry:
        return open_entry(
            sequence.handle,
            sequence.tokens,
            sequence_id=sequence.job.name,
            identity=types_pb2.Identity(cache_salt=sequence.job.cache_salt),
            schedule_token_count_max=CHUNK_TOKEN_COUNT,
            preemption_count=sequence.preemption_count,
        )

    def _cut(self, cut: cache_pb2.CutSequence) -> None:
        sequence = self._running.get(cut.handle)
        if sequence is not None:
            assert cut.known_count == sequence.told
            assert cut.scheduled_count % self._block_size == 0
            sequence.scheduled = cut.scheduled_count
            sequence.is_cut = True
            del sequence.table[cut.scheduled_count // self._block_size :]

    def _take_plans(
        self,
        entries: list[cache_pb2.StepEntry],
        sequences: list[list[Sequence]],
        response: cache_pb2.StepResponse,
    ) -> list[tuple[Sequence, int]]:
        """Updates tables and counts; returns (sequence, first scheduled position) of each plan."""
        scheduled = []
        for entry, of, outcome in zip(entries, sequences, response.outcomes, strict=True):
            kind = entry.WhichOneof("entry")
            if kind == "decode":
                # A row of a sequence that this same step cut is deferred; the extend comes next.
                deferred = {row.row for row in outcome.decode.deferred_rows}
                for row, sequence in enumerate(of):
                    if row in deferred:
                        assert sequence.is_cut
                        continue
                    block_id = outcome.decode.new_blocks[0].block_ids[row]
                    sequence.table.extend([block_id] if block_id else [])
                    scheduled.append((sequence, sequence.scheduled))
                    sequence.scheduled += 1
                    sequence.told = len(sequence.tokens)
            elif kind in ("open", "extend"):
                if outcome.WhichOneof("outcome") == "refusal":
                    # An extend that names the counts from before this step's cut is stale.
                    assert of[0].is_cut
                    continue
                plan = getattr(outcome, kind).plan
                self._check_plan(of[0], plan)
                of[0].told, of[0].is_cut = len(of[0].tokens), False
                scheduled.append((of[0], plan.scheduled.start_token))
                of[0].scheduled = plan.scheduled.end_token
        return scheduled

    def _check_plan(self, sequence: Sequence, plan: cache_pb2.SequencePlan) -> None:
        group = plan.groups[0]
        assert group.start_block == len(sequence.table)
        sequence.table.extend(group.block_ids)
        slots = [
            slot
            for first, count in zip(group.slots.first_slots, group.slots.slot_counts, strict=True)
            for slot in range(first, first + count)
        ]
        positions = range(plan.scheduled.start_token, plan.scheduled.end_token)
        assert slots == [self._slot(sequence, position) for position in positions]

    def _execute(self, scheduled: list[tuple[Sequence, int]]) -> None:
        # Every token of the pass is stored before any row attends.
        for sequence, start in scheduled:
            for position in range(start, sequence.scheduled):
                self._kv[self._slot(sequence, position)] = sequence.tokens[position]
        for sequence, _ in scheduled:
            seen = [self._kv[self._slot(sequence, p)] for p in range(sequence.scheduled)]
            assert seen == sequence.tokens[: sequence.scheduled]
            if sequence.scheduled == len(sequence.tokens):
                sequence.tokens.append(zlib.crc32(bytes(seen)) % VOCABULARY_SIZE)

    def _slot(self, sequence: Sequence, position: int) -> int:
        block_index, offset = divmod(position, self._block_size)
        return sequence.table[block_index] * self._block_size + offset
