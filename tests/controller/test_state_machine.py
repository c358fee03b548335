"""Drives the core's pool and the naive model side by side with whatever hypothesis can think of."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import BlocksInUse, CacheError
from prefixd.controller.core.hashing import HASHES, Hasher
from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import (
    BlockId,
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
from tests.model.eviction import evict
from tests.model.malformed import MALFORMED
from tests.model.sequence import NaiveSequence
from tests.model.steps import NaiveLog
from tests.model.strategies import (
    Extension,
    Forking,
    Opening,
    Row,
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
OFTEN = st.booleans()
RARELY = st.sampled_from((False, False, True))
LOOKS = st.sampled_from((False, False, False, True))
LAGS = st.sampled_from((0, 1, 0, 2, 3))


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

    @initialize(algorithm=st.sampled_from(sorted(HASHES)), spec=pool_specs())
    def register(self, algorithm: str, spec: PoolSpec) -> None:
        """Makes both pools."""
        self.algorithm = algorithm
        self.root = root_digest(algorithm, seed=SEED)
        with mock.patch.dict(EVICTION_POLICIES, {"arbitrary": Arbitrary}):
            self.pool = Pool(spec, epoch=1, hasher=Hasher(algorithm, seed=SEED))
            self.model = NaiveLog(spec)

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
        reply = self.pool.apply_step(step, now_ms=step.step_id * STEP_MS)
        self.sent[step.step_id], self.replies[step.step_id] = step, reply
        assert_equal_replies(of_core=reply, of_model=expected)
        self.compare(look=look)

    def compare(self, *, look: bool) -> None:
        """Compares both pools; a look at the blocks makes the core compute its digests."""
        invariants.check(self.pool)
        assert_equal_tables(self.pool, self.model)
        if look:
            assert_equal_pools(self.pool, self.model, algorithm=self.algorithm, root=self.root)

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
    @rule(opening=openings(), lag=LAGS, more=RARELY, look=LOOKS)
    def open(self, opening: Opening, lag: int, more: bool, look: bool) -> None:
        """Opens a sequence, most often behind a prompt that was seen before."""
        self.begin(lag=lag, budget=opening.token_budget)
        prompt = self.prompt(opening.prompt)
        token_ids = [*prompt[: opening.shared_token_count], *opening.token_ids]
        self.prompts = [*self.prompts[-7:], token_ids]
        handle, name = self.next_name()
        if opening.repeats_name and self.model.sequences:
            name = self.pick(opening.prompt).sequence_id
        outcome = self.add(opening.entry(handle, name, token_ids))
        if isinstance(outcome, Refusal):
            self.make_room(outcome.reason)
        if not more:
            self.send(look=look)

    @precondition(lambda self: len(self.model.sequences) < SEQUENCES_MAX)
    @rule(opening=openings(), lag=LAGS, more=RARELY, look=LOOKS)
    def open_again(self, opening: Opening, lag: int, more: bool, look: bool) -> None:
        """Opens a preempted sequence again with all its tokens, or repeats a prompt."""
        self.begin(lag=lag, budget=opening.token_budget)
        if not self.preempted:
            self.repeat_prompt(opening.prompt)
            if not more:
                self.send(look=look)
            return
        token_ids, identity, preemption_count = self.preempted.pop()
        handle, name = self.next_name()
        entry = opening.entry_again(
            handle, name, token_ids, identity=identity, preemption_count=preemption_count
        )
        if not isinstance(self.add(entry), OpenOutcome):
            self.preempted.append((token_ids, identity, preemption_count))
        if not more:
            self.send(look=look)

    @rule(extension=extensions(), lag=LAGS, more=RARELY, look=LOOKS)
    def extend(self, extension: Extension, lag: int, more: bool, look: bool) -> None:
        """Adds tokens, a chunk, drafts, lookahead slots; takes drafts back."""
        self.begin(lag=lag, budget=extension.token_budget)
        if self.has_sequence(extension.sequence):
            self.add(extension.entry(self.pick(extension.sequence)))
        if not more:
            self.send(look=look)

    @precondition(lambda self: len(self.model.sequences) < SEQUENCES_MAX)
    @rule(drawn=forkings(), lag=LAGS, more=OFTEN, look=LOOKS)
    def fork(self, drawn: Forking, lag: int, more: bool, look: bool) -> None:
        """Forks a sequence; children often write in the same step."""
        self.begin(lag=lag)
        if self.has_sequence(drawn.sequence):
            handle, name = self.next_name()
            self.add(drawn.entry(self.pick(drawn.sequence), handle, name))
        if not more:
            self.send(look=look)

    @rule(drawn=rows(), lag=LAGS, more=RARELY, look=LOOKS)
    def decode(self, drawn: list[Row], lag: int, more: bool, look: bool) -> None:
        """Decodes some or all sequences; a row may name a wrong place or no sequence."""
        self.begin(lag=lag)
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
        if not more:
            self.send(look=look)

    @precondition(lambda self: self.model.sequences)
    @rule(
        number=st.integers(0, 7),
        reason=st.sampled_from(CloseReason),
        hint=st.none() | retention_hints(),
        lag=LAGS,
        more=RARELY,
        look=LOOKS,
    )
    def close(
        self,
        number: int,
        reason: CloseReason,
        hint: RetentionHint | None,
        lag: int,
        more: bool,
        look: bool,
    ) -> None:
        """Closes a sequence; a preempted one may be opened again."""
        self.begin(lag=lag)
        sequence = self.pick(number)
        if reason is CloseReason.PREEMPTED:
            self.preempted.append(
                (list(sequence.token_ids), sequence.identity, sequence.preemption_count + 1)
            )
        self.add(CloseEntry(sequence.handle, reason, hint))
        if not more:
            self.send(look=look)

    # The log.

    @rule(lag=LAGS, look=LOOKS)
    def confirm(self, lag: int, look: bool) -> None:
        """Sends what is begun, or an empty step."""
        self.begin(lag=lag)
        self.send(look=look)

    @precondition(
        lambda self: self.begun is None and self.model.applied_step_id > self.model.settled_step_id
    )
    @rule(executed=st.integers(0, 3), more=RARELY, look=LOOKS)
    def fail(self, executed: int, more: bool, look: bool) -> None:
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
        if not more:
            self.send(look=look)

    # Calls that change little or nothing, in one rule: entries should be drawn more often.

    @precondition(lambda self: self.begun is None)
    @rule(
        call=st.sampled_from(
            ("repeat", "malform", "match", "hash_slice", "flush", "bump", "evict")
        ),
        number=st.integers(0, len(MALFORMED) - 1),
        opening=openings(),
        look=LOOKS,
    )
    def call_aside(self, call: str, number: int, opening: Opening, look: bool) -> None:
        """Makes a call that is no next step."""
        match call:
            case "repeat":
                self.repeat(number)
            case "malform":
                self.malform(sorted(MALFORMED)[number])
            case "match":
                self.match(opening)
            case "hash_slice":
                self.pool.hash_slice(1 + number)
            case "flush":
                self.flush()
            case "bump":
                self.bump(("w2", "w1", "")[number % 3])
            case "evict":
                self.evict(number)
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

    def match(self, opening: Opening) -> None:
        """Matching agrees; that it changes nothing is compared behind it (S8)."""
        prompt = self.prompt(opening.prompt)
        token_ids = [*prompt[: opening.shared_token_count], *opening.token_ids]
        found = self.pool.match_prefix(np.array(token_ids, np.uint32), opening.identity)
        assert found == self.model.match_prefix(token_ids, opening.identity)

    def flush(self) -> None:
        """A flush drops the same blocks or is refused with the same count (S21)."""
        try:
            expected: object = self.model.flush()
        except BlocksInUse as refused:
            expected = refused.numbers
        try:
            dropped: object = self.pool.flush()
        except BlocksInUse as refused:
            dropped = refused.numbers
        assert dropped == expected

    def bump(self, model_version: str) -> None:
        """Another version of the weights comes into force (S4)."""
        dropped = self.pool.set_model_version(model_version)
        assert dropped == self.model.set_model_version(model_version)

    def evict(self, number: int) -> None:
        """Evicts what two blocks hold, published ones by their digests or not (S13, S19)."""
        usable_count = self.model.spec.block_count - 1
        named = {BlockId(1 + drawn % usable_count) for drawn in (number, number * 7)}
        published = self.model.published()
        digested = {published[block] for block in named if block in published and number % 2}
        digests = {
            self.model.digest_of(place, algorithm=self.algorithm, root=self.root)
            for place in digested
        }
        named = {block for block in named if published.get(block) not in digested}
        dropped = self.pool.evict_blocks(block_ids=named, digests=digests)
        expected = evict(self.model, named, digested)
        assert (dropped.block_count, dropped.held_block_count) == expected

    def teardown(self) -> None:
        """Closes everything: nothing is held, and a flush succeeds."""
        if not hasattr(self, "pool"):
            return
        self.begin(lag=0)
        for handle in list(self.model.sequences):
            self.add(CloseEntry(handle, CloseReason.FINISHED))
        self.send(look=True)
        self.begin(lag=0)
        self.send(look=True)
        assert self.pool.flush() == self.model.flush()
        self.compare(look=True)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=80)
