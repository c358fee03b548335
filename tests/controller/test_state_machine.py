"""Drives the core's pool and the naive model side by side with whatever hypothesis can think of."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import CacheError
from prefixd.controller.core.hashing import HASHES, Hasher
from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    DecodeOutcome,
    Entry,
    FailedSteps,
    Handle,
    Identity,
    OpenEntry,
    OpenOutcome,
    PoolSpec,
    Refusal,
    SequenceId,
    Step,
    StepId,
    StepReply,
)
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.core.pool import Pool
from tests.model.arbitrary_policy import Arbitrary
from tests.model.columns import columns
from tests.model.compare import (
    assert_equal_pools,
    assert_equal_replies,
    assert_equal_tables,
)
from tests.model.digests import root_digest
from tests.model.malformed import MALFORMED
from tests.model.operators import bump_both, evict_both, flush_both, match_both
from tests.model.sequence import NaiveSequence
from tests.model.steps import NaiveLog
from tests.model.strategies import (
    WHEN,
    Extension,
    Forking,
    Opening,
    Row,
    When,
    extensions,
    forkings,
    openings,
    pool_specs,
    retention_hints,
    rows,
)

SEED = "0"
STEP_MS = 10
"""Time that passes from one step to the next."""
SEQUENCES_MAX = 6


class PoolMachine(RuleBasedStateMachine):
    """Builds steps entry by entry. The model takes each entry at once, so that the next one can be
    drawn to fit it; the core takes the whole step when it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Step | None = None
        self.entries: list[Entry] = []
        self.sent: dict[int, Step] = {}
        self.replies: dict[int, StepReply] = {}
        self.prompts: list[list[int]] = [[1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0]]
        self.preempted: list[tuple[list[int], Identity, int]] = []
        self.opened_count = 0
        self.is_sound = False

    @initialize(algorithm=st.sampled_from(sorted(HASHES)), spec=pool_specs())
    def register(self, algorithm: str, spec: PoolSpec) -> None:
        """Makes both pools."""
        self.algorithm = algorithm
        self.root = root_digest(algorithm, seed=SEED)
        with mock.patch.dict(EVICTION_POLICIES, {"arbitrary": Arbitrary}):
            self.pool = Pool(spec, epoch=1, hasher=Hasher(algorithm, seed=SEED))
            self.model = NaiveLog(spec)
        self.is_sound = True

    # Building and sending steps.

    def begin(self, *, lag: int, budget: int | None = None) -> None:
        """Begins a step that leaves `lag` steps unconfirmed, unless one is begun already."""
        if self.begun is not None:
            return
        applied = self.model.applied_step_id
        lag = min(lag, STEPS_IN_FLIGHT_MAX - 1)
        executed = max(self.model.executed_step_id, applied - lag)
        self.begun = Step(StepId(applied + 1), StepId(executed), token_budget=budget)
        self.model.now_ms = self.begun.step_id * STEP_MS
        self.model.begin_step(self.begun)

    def add(self, entry: Entry) -> object:
        """Adds an entry to the begun step."""
        self.entries.append(entry)
        return self.model.add_entry(entry)

    def send(self, *, look: bool) -> None:
        """Sends the begun step to the core and compares."""
        header = self.begun
        assert header is not None
        step = Step(
            header.step_id,
            header.executed_step_id,
            tuple(self.entries),
            header.failed,
            header.token_budget,
        )
        self.begun, self.entries = None, []
        expected = self.model.finish_step()
        self.is_sound = False
        reply = self.pool.apply_step(step, now_ms=step.step_id * STEP_MS)
        self.sent[step.step_id], self.replies[step.step_id] = step, reply
        assert_equal_replies(of_core=reply, of_model=expected)
        self.compare(look=look)

    def compare(self, *, look: bool) -> None:
        """Compares both pools; a look at the blocks makes the core compute its digests."""
        self.is_sound = False
        invariants.check(self.pool)
        assert_equal_tables(self.pool, self.model)
        if look:
            assert_equal_pools(self.pool, self.model, algorithm=self.algorithm, root=self.root)
        self.is_sound = True

    def make_room(self, *reasons: str) -> None:
        """Closes the oldest sequence where the pool was exhausted, as an engine would."""
        if "POOL_EXHAUSTED" in reasons and self.model.sequences:
            self.add(CloseEntry(self.pick(0).handle, CloseReason.ABORTED))

    def has_sequence(self, number: int) -> bool:
        """Repeats a prompt where no sequence is open, so that the next entry has one to act on;
        False where that is refused."""
        if not self.model.sequences:
            self.repeat_prompt(number)
        return bool(self.model.sequences)

    def repeat_prompt(self, number: int) -> None:
        """Opens a sequence with a prompt that was seen before."""
        handle, name = self.next_name()
        prompt = self.prompt(number)
        self.add(OpenEntry(handle, name, np.array(prompt, np.uint32)))

    def prompt(self, number: int) -> list[int]:
        """Picks a prompt that was seen before; 0 is the last one."""
        return self.prompts[-1 - number % len(self.prompts)]

    def token_ids(self, opening: Opening) -> list[int]:
        """Returns the tokens of an opening, which begin as a prompt that was seen before does."""
        prompt = self.prompt(opening.prompt)
        return [*prompt[: opening.shared_token_count], *opening.token_ids]

    def pick(self, number: int) -> NaiveSequence:
        """Picks an open sequence."""
        sequences = list(self.model.sequences.values())
        return sequences[number % len(sequences)]

    def next_name(self) -> tuple[Handle, SequenceId]:
        """Names a sequence; names are sometimes used twice, handles never."""
        self.opened_count += 1
        return Handle(self.opened_count), SequenceId(f"s{self.opened_count}")

    # Entries.

    @precondition(lambda self: len(self.model.sequences) < SEQUENCES_MAX)
    @rule(opening=openings(), when=WHEN)
    def open(self, opening: Opening, when: When) -> None:
        """Opens a sequence, most often behind a prompt that was seen before."""
        self.begin(lag=when.lag, budget=opening.token_budget)
        token_ids = self.token_ids(opening)
        self.prompts = [*self.prompts[-7:], token_ids]
        handle, name = self.next_name()
        if opening.repeats_name and self.model.sequences:
            name = self.pick(opening.prompt).sequence_id
        outcome = self.add(opening.entry(handle, name, token_ids))
        if isinstance(outcome, Refusal):
            self.make_room(outcome.reason)
        if not when.more:
            self.send(look=when.look)

    @precondition(lambda self: len(self.model.sequences) < SEQUENCES_MAX)
    @rule(opening=openings(), when=WHEN)
    def open_again(self, opening: Opening, when: When) -> None:
        """Opens a preempted sequence again with all its tokens, or repeats a prompt."""
        self.begin(lag=when.lag, budget=opening.token_budget)
        if not self.preempted:
            self.repeat_prompt(opening.prompt)
            if not when.more:
                self.send(look=when.look)
            return
        token_ids, identity, preemption_count = self.preempted.pop()
        handle, name = self.next_name()
        entry = opening.entry_again(
            handle, name, token_ids, identity=identity, preemption_count=preemption_count
        )
        if not isinstance(self.add(entry), OpenOutcome):
            self.preempted.append((token_ids, identity, preemption_count))
        if not when.more:
            self.send(look=when.look)

    @rule(extension=extensions(), when=WHEN)
    def extend(self, extension: Extension, when: When) -> None:
        """Adds tokens, a chunk, drafts, lookahead slots; takes drafts back."""
        self.begin(lag=when.lag, budget=extension.token_budget)
        if self.has_sequence(extension.sequence):
            self.add(extension.entry(self.pick(extension.sequence)))
        if not when.more:
            self.send(look=when.look)

    @precondition(lambda self: len(self.model.sequences) < SEQUENCES_MAX)
    @rule(drawn=forkings(), when=WHEN)
    def fork(self, drawn: Forking, when: When) -> None:
        """Forks a sequence; children often write in the same step."""
        self.begin(lag=when.lag)
        if self.has_sequence(drawn.sequence):
            handle, name = self.next_name()
            self.add(drawn.entry(self.pick(drawn.sequence), handle, name))
        if not when.more:
            self.send(look=when.look)

    @rule(drawn=rows(), when=WHEN)
    def decode(self, drawn: list[Row], when: When) -> None:
        """Decodes some or all sequences; a row may name a wrong place or no sequence."""
        self.begin(lag=when.lag)
        parts: dict[int, tuple[int, int, int, tuple[int, ...]]] = {}
        for row in drawn if self.has_sequence(drawn[0].sequence) else ():
            sequence = self.pick(row.sequence)
            handle = int(sequence.handle) + (1_000 if row.names_nobody else 0)
            place = sequence.scheduled + row.misplaced_by
            parts[handle] = (handle, max(place, 0), sequence.known, row.token_ids)
        if parts:
            outcome = self.add(columns(list(parts.values())))
            assert isinstance(outcome, DecodeOutcome)
            self.make_room(*(row.reason for row in outcome.deferred_rows))
        if not when.more:
            self.send(look=when.look)

    @precondition(lambda self: self.model.sequences)
    @rule(
        number=st.integers(0, 7),
        reason=st.sampled_from(CloseReason),
        hint=st.none() | retention_hints(),
        when=WHEN,
    )
    def close(
        self,
        number: int,
        reason: CloseReason,
        hint: RetentionHint | None,
        when: When,
    ) -> None:
        """Closes a sequence; a preempted one may be opened again."""
        self.begin(lag=when.lag)
        sequence = self.pick(number)
        if reason is CloseReason.PREEMPTED:
            self.preempted.append(
                (list(sequence.token_ids), sequence.identity, sequence.preemption_count + 1)
            )
        self.add(CloseEntry(sequence.handle, reason, hint))
        if not when.more:
            self.send(look=when.look)

    # The log.

    @rule(when=WHEN)
    def confirm(self, when: When) -> None:
        """Sends what is begun, or an empty step."""
        self.begin(lag=when.lag)
        self.send(look=when.look)

    @precondition(
        lambda self: self.begun is None and self.model.applied_step_id > self.model.settled_step_id
    )
    @rule(executed=st.integers(0, 3), when=WHEN)
    def fail(self, executed: int, when: When) -> None:
        """Reports that the last steps were not executed."""
        applied, settled = self.model.applied_step_id, self.model.settled_step_id
        executed = min(settled + executed, applied - 1)
        self.begun = Step(
            StepId(applied + 1),
            StepId(executed),
            failed=FailedSteps(StepId(executed + 1), StepId(applied)),
        )
        self.model.now_ms = self.begun.step_id * STEP_MS
        self.model.begin_step(self.begun)
        if not when.more:
            self.send(look=when.look)

    # Calls that change little or nothing, in one rule: entries should be drawn more often.

    @precondition(lambda self: self.begun is None)
    @rule(
        call=st.sampled_from(
            ("evict", "evict", "repeat", "malform", "match", "hash_slice", "flush", "bump")
        ),
        number=st.integers(0, len(MALFORMED) - 1),
        opening=openings(),
        look=st.booleans(),
    )
    def call_aside(self, call: str, number: int, opening: Opening, look: bool) -> None:
        """Makes a call that is no next step."""
        match call:
            case "repeat":
                self.repeat(number)
            case "malform":
                self.malform(sorted(MALFORMED)[number])
            case "match":
                match_both(self.pool, self.model, self.token_ids(opening), opening.identity)
            case "hash_slice":
                self.pool.hash_slice(1 + number)
            case "flush":
                flush_both(self.pool, self.model)
            case "bump":
                bump_both(self.pool, self.model, ("w2", "w1", "")[number % 3])
            case "evict":
                self.evict(opening.prompt, number)
        self.compare(look=look)

    def repeat(self, number: int) -> None:
        """Sends a known step again: it gets its reply again."""
        known = sorted(self.model.replies)
        if known:
            step_id = known[number % len(known)]
            reply = self.pool.apply_step(self.sent[step_id], now_ms=0)
            assert reply is self.replies[step_id]

    def malform(self, name: str) -> None:
        """Sends a step that is refused as a whole."""
        with pytest.raises(CacheError) as refused:
            self.pool.apply_step(MALFORMED[name](self.model), now_ms=0)
        assert refused.value.reason == name.split(maxsplit=1)[0]

    def evict(self, prompt: int, number: int) -> None:
        """Evicts a block of a prompt, which is asked for again, twice: the second sequence finds
        what the first one computes."""
        token_ids = self.prompt(prompt)
        evict_both(
            self.pool, self.model, token_ids, number, algorithm=self.algorithm, root=self.root
        )
        if number % 2 == 0:
            self.begin(lag=0)
            self.repeat_prompt(prompt)
            self.repeat_prompt(prompt)
            self.send(look=True)

    def teardown(self) -> None:
        """Closes everything: nothing is held, and a flush succeeds. Where something differed
        before, that is the error to tell."""
        if not self.is_sound:
            return
        self.begin(lag=0)
        for handle in list(self.model.sequences):
            self.add(CloseEntry(handle, CloseReason.FINISHED))
        self.send(look=True)
        self.begin(lag=0)
        self.send(look=True)
        assert self.pool.flush() == self.model.flush()
        self.compare(look=True)


@pytest.mark.timeout(600)
def test_s20_s23_core_and_model_agree_whatever_happens() -> None:
    """With every entry, failure and operator's call, in pools with and without window groups (S23),
    of every option, hash and eviction policy (S20)."""
    run_state_machine_as_test(PoolMachine, settings=settings(stateful_step_count=80))
