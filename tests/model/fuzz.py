"""Long random runs of the core's pool beside the naive model: `python -m tests.model.fuzz`.

Where hypothesis explores many short histories, this explores few long ones, in larger pools. A
failing seed prints the steps behind it: `python -m tests.model.fuzz --seed N` runs it again.
"""

import argparse
import random
import sys
from collections import deque
from dataclasses import dataclass, replace

from prefixd.controller.core import invariants
from prefixd.controller.core.hashing import HASHES, Hasher
from prefixd.controller.core.hints import NO_HINT, Continuation, RetentionHint
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    Entry,
    FailedSteps,
    Handle,
    Identity,
    PoolSpec,
    SequenceId,
    Step,
    StepId,
)
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.core.pool import Pool
from tests.model.columns import columns
from tests.model.compare import (
    assert_equal_pools,
    assert_equal_replies,
    assert_equal_tables,
)
from tests.model.digests import root_digest
from tests.model.sequence import NaiveSequence
from tests.model.steps import NaiveLog
from tests.model.strategies import IDENTITIES, Extension, Forking, Opening, groups

SEED = "0"
STEPS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run looks like: the pool, and how often what happens."""

    block_count: int
    block_size: int
    sequence_count_max: int
    prompt_token_count_max: int
    vocabulary_size: int
    failure_rate: float
    identity_rate: float
    fork_rate: float
    sub_block_reuse: bool
    merge_duplicates: bool
    skip_rate: float
    windows: tuple[int, ...]
    eviction_policy: str

    @classmethod
    def draw(cls, chance: random.Random) -> "Shape":
        """Draws a shape."""
        block_size = chance.choice((1, 1, 2, 3, 4, 8))
        block_count = chance.choice((6, 12, 40, 120))
        shape = cls(
            block_count=block_count,
            block_size=block_size,
            sequence_count_max=chance.choice((2, 6, 20)),
            prompt_token_count_max=min(block_count * block_size, 60),
            # With one token every sequence is a prefix of every longer one.
            vocabulary_size=chance.choice((1, 2, 2, 3, 8)),
            failure_rate=chance.choice((0.0, 0.02, 0.1)),
            identity_rate=chance.choice((0.0, 0.3)),
            fork_rate=chance.choice((0.0, 0.3, 0.6)),
            sub_block_reuse=chance.choice((False, True)),
            merge_duplicates=chance.choice((False, True)),
            skip_rate=chance.choice((0.0, 0.15, 0.5)),
            windows=(),
            eviction_policy=chance.choice(sorted(EVICTION_POLICIES)),
        )
        window_count = chance.choice((0, 0, 1, 2))
        if not window_count:
            return shape
        return replace(
            shape,
            block_count=block_count * (1 + window_count),
            windows=tuple(
                chance.choice((0, *range(1, 3 * block_size + 1))) for _ in range(window_count)
            ),
        )


class Run:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.shape = Shape.draw(self.chance)
        self.algorithm = self.chance.choice(sorted(HASHES))
        spec = PoolSpec(
            pool_name="fuzz",
            block_count=self.shape.block_count,
            block_size=self.shape.block_size,
            groups=groups(self.shape.windows),
            sub_block_reuse=self.shape.sub_block_reuse,
            merge_duplicates=self.shape.merge_duplicates,
            eviction_policy=self.shape.eviction_policy,
        )
        self.pool = Pool(spec, epoch=1, hasher=Hasher(self.algorithm, seed=SEED))
        self.model = NaiveLog(spec)
        self.prompts: deque[list[int]] = deque([[0] * 8], maxlen=12)
        self.preempted: list[tuple[list[int], Identity, int]] = []
        self.opened_count = 0
        self.history: deque[Step] = deque(maxlen=STEPS_SHOWN)

    def rarely(self, rate: float) -> bool:
        """Says yes this often."""
        return self.chance.random() < rate

    def tokens(self, count: int) -> list[int]:
        """Draws tokens."""
        return [self.chance.randrange(self.shape.vocabulary_size) for _ in range(count)]

    def step(self) -> None:
        """Takes one random step and compares."""
        applied = self.model.applied_step_id
        lag = self.chance.choice((0, 0, 1, 2, STEPS_IN_FLIGHT_MAX - 1))
        executed = max(self.model.executed_step_id, applied - lag)
        failed = None
        first = max(executed, self.model.settled_step_id) + 1
        if first <= applied and self.rarely(self.shape.failure_rate * 3):
            failed = FailedSteps(StepId(first), StepId(applied))
        budget = self.chance.randrange(20) if self.rarely(0.1) else None
        header = Step(StepId(applied + 1), StepId(executed), failed=failed, token_budget=budget)
        self.model.now_ms = applied
        self.model.begin_step(header)
        entries: list[Entry] = []
        for _ in range(self.chance.choice((0, 1, 1, 1, 2, 3))):
            entry = self.entry()
            entries.append(entry)
            self.model.add_entry(entry)
        step = Step(header.step_id, header.executed_step_id, tuple(entries), failed, budget)
        self.history.append(step)
        reply = self.pool.apply_step(step, now_ms=applied)
        assert_equal_replies(of_core=reply, of_model=self.model.finish_step())
        invariants.check(self.pool)
        assert_equal_tables(self.pool, self.model)
        if self.rarely(0.2):
            self.look()
        if self.rarely(0.2):
            self.pool.hash_slice(self.chance.randrange(1, 9))

    def look(self) -> None:
        """Compares everything that can be seen."""
        root = root_digest(self.algorithm, seed=SEED)
        assert_equal_pools(self.pool, self.model, algorithm=self.algorithm, root=root)

    def entry(self) -> Entry:
        """Draws an entry."""
        sequences = list(self.model.sequences.values())
        if not sequences:
            return self.opening()
        if len(sequences) >= self.shape.sequence_count_max or self.rarely(0.2):
            sequence = self.chance.choice(sequences)
            reason = self.chance.choice(list(CloseReason))
            if reason is CloseReason.PREEMPTED:
                again = (sequence.token_ids, sequence.identity, sequence.preemption_count + 1)
                self.preempted.append(again)
            return CloseEntry(sequence.handle, reason, self.hint() if self.rarely(0.5) else None)
        if self.rarely(0.4 * (1 - self.shape.fork_rate)):
            return self.opening()
        if self.rarely(0.5 * self.shape.fork_rate):
            return self.fork(self.chance.choice(sequences))
        if self.rarely(0.4):
            return self.extension().entry(self.chance.choice(sequences))
        chosen = self.chance.sample(sequences, self.chance.randint(1, len(sequences)))
        return columns(
            [
                (
                    int(sequence.handle),
                    sequence.scheduled,
                    sequence.known,
                    tuple(self.tokens(self.chance.choice((0, 1, 1, 1, 1, 2)))),
                )
                for sequence in chosen
            ]
        )

    def opening(self) -> Entry:
        """Draws an open, of a preempted sequence or behind a prompt that was seen before."""
        self.opened_count += 1
        handle = Handle(self.opened_count)
        name = SequenceId(f"s{self.opened_count}")
        identity = Identity()
        if self.rarely(self.shape.identity_rate):
            identity = self.chance.choice(IDENTITIES)
        drawn = Opening(
            prompt=0,
            shared_token_count=0,
            token_ids=(),
            identity=identity,
            schedule_token_count_max=self.chance.choice((None, None, 0, 1, 4, 9)),
            lookahead_slot_count=self.chance.choice((0, 0, 0, 3)),
            must_fit_token_count=self.chance.choice((0, 0, 10)),
            await_token_count_min=self.chance.choice((0, 0, 0, 2)),
            token_budget=None,
            skip_cache_read=self.rarely(self.shape.skip_rate),
            repeats_name=False,
            retention_hint=self.hint() if self.rarely(0.3) else NO_HINT,
        )
        if self.preempted and self.rarely(0.5):
            token_ids, identity, count = self.preempted.pop()
            return drawn.entry_again(
                handle, name, token_ids, identity=identity, preemption_count=count
            )
        if self.rarely(0.25):
            return drawn.entry(handle, name, self.prompts[-1])
        prompt = self.chance.choice(self.prompts)
        shared = prompt[: self.chance.randint(0, len(prompt))]
        behind = self.tokens(self.chance.choice((1, 2, 5, 12)))
        token_ids = [*shared, *behind][-self.shape.prompt_token_count_max :]
        self.prompts.append(token_ids)
        return drawn.entry(handle, name, token_ids)

    def fork(self, parent: NaiveSequence) -> Entry:
        """Draws a fork, most often at the end."""
        self.opened_count += 1
        drawn = Forking(
            sequence=0,
            left_out_token_count=self.chance.choice((0, 0, 0, 1, 2, 5)),
            repeats_name=False,
        )
        name = SequenceId(f"s{self.opened_count}")
        return drawn.entry(parent, Handle(self.opened_count), name)

    def hint(self) -> RetentionHint:
        """Draws a hint."""
        return RetentionHint(
            continuation=self.chance.choice(list(Continuation)),
            priority=self.chance.choice((0, 0, 1, 7)),
            duration_ms=self.chance.choice((0, 0, 5, 40)),
        )

    def extension(self) -> Extension:
        """Draws an extension."""
        return Extension(
            sequence=0,
            token_ids=tuple(self.tokens(self.chance.choice((0, 0, 1, 3, 9)))),
            schedule_token_count_max=self.chance.choice((None, None, 1, 4)),
            lookahead_slot_count=self.chance.choice((0, 0, 2)),
            draft_token_count=self.chance.choice((0, 0, 0, 1, 4)),
            rolled_back_token_count=self.chance.choice((None, 0, 1, 3)),
            token_budget=None,
            misplaced=False,
        )


def run_seed(seed: int, *, step_count: int) -> None:
    """Runs one history. Raises whatever differs, after printing the last steps."""
    run = Run(seed)
    try:
        for _ in range(step_count):
            run.step()
        run.look()
    except Exception:
        print(f"seed {seed}: {run.shape}, step {run.model.applied_step_id}", file=sys.stderr)
        for step in run.history:
            print(f"  {step}", file=sys.stderr)
        raise


def main() -> None:
    """Runs the seeds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=2_000, help="steps of each history")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.seeds):
        run_seed(seed, step_count=options.steps)
    print(f"{options.seeds} histories of {options.steps} steps: all equal")


if __name__ == "__main__":
    main()
