"""Random histories on a simulated worker: every pass reads exactly the prefixes it should."""

import random

import pytest

from prefixd.controller.core import invariants
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    Entry,
    FailedSteps,
    GroupKind,
    GroupSpec,
    Handle,
    Identity,
    PoolSpec,
    Step,
    StepId,
)
from prefixd.controller.core.pool import Pool
from tests.controller.core.driver import decode_entry, extend_entry, fork_entry, open_entry
from tests.model.memory import Memory

STEP_COUNT = 200


class WorkerRun:
    """One random history of a pool, with its steps up to three in flight.

    Behind its first group the pool has `full_count` more of full attention and `window_count` of
    sliding windows.
    """

    def __init__(self, seed: int, *, window_count: int = 0, full_count: int = 0) -> None:
        self.chance = random.Random(seed)
        block_size = self.chance.choice((1, 2, 3, 4) if window_count else (2, 3, 4, 8))
        group_count = 1 + full_count + window_count
        windows = [self.chance.randint(1, 3 * block_size) for _ in range(window_count)]
        self.pool = Pool(
            PoolSpec(
                "memory",
                block_count=self.chance.choice((12, 30, 80)) * group_count,
                block_size=block_size,
                groups=(
                    *(GroupSpec() for _ in range(1 + full_count)),
                    *(GroupSpec(GroupKind.SLIDING_WINDOW, window) for window in windows),
                ),
                sub_block_reuse=self.chance.choice((False, True)),
                merge_duplicates=self.chance.choice((False, True)),
            ),
            epoch=1,
            hasher=Hasher("xxhash_cbor", seed="0"),
        )
        self.memory = Memory(block_size=block_size, windows=(*[None] * (1 + full_count), *windows))
        self.prompts = [[0] * 9]
        self.handle_last = 0

    def step(self) -> None:
        """Takes one step of some entries, each on a sequence of its own but for forks."""
        applied = self.pool.applied_step_id
        settled = self.pool.state.log.settled_id
        lag = self.chance.choice((0, 0, 1, 2, STEPS_IN_FLIGHT_MAX - 1))
        executed = StepId(max(self.pool.executed_step_id, applied - lag))
        failed = None
        first = StepId(max(settled, executed) + 1)
        if first <= applied and self.chance.random() < 0.1:
            failed = FailedSteps(first, applied)
        groups: list[list[Entry]] = []
        idle = list(self.memory.sequences)
        self.chance.shuffle(idle)
        # A failed step changes positions, so nothing but opens goes with it.
        while failed is None and idle and self.chance.random() < 0.8:
            groups.append(self.entries_for(idle.pop()))
        for _ in range(self.chance.choice((0, 0, 1, 1, 2))):
            groups.append(self.opening())
        self.chance.shuffle(groups)
        entries = tuple(entry for group in groups for entry in group)
        step = Step(StepId(applied + 1), executed, entries, failed)
        reply = self.pool.apply_step(step, now_ms=applied)
        self.memory.take(step, reply)

    def tokens(self, count: int) -> list[int]:
        """Draws tokens."""
        return [self.chance.randrange(2) for _ in range(count)]

    def opening(self) -> list[Entry]:
        """Draws an open behind a prompt that was seen before; some fork at once, or close."""
        self.handle_last += 1
        prompt = self.chance.choice(self.prompts[-10:])
        token_ids = prompt[: self.chance.randint(0, len(prompt))] + self.tokens(3)
        self.prompts.append(token_ids)
        handle = self.handle_last
        entry = open_entry(
            handle,
            token_ids,
            identity=Identity(cache_salt=self.chance.choice(("", "", "salt"))),
            schedule_token_count_max=self.chance.choice((None, None, 4)),
            skip_cache_read=self.chance.random() < 0.2,
        )
        choice = self.chance.random()
        if choice < 0.4:
            return [entry, *self.forks(handle, len(token_ids))]
        if choice < 0.5:
            return [entry, CloseEntry(Handle(handle), CloseReason.ABORTED)]
        return [entry]

    def forks(self, parent: int, token_count: int) -> list[Entry]:
        """Draws a fork; its child may write, be forked itself, or outlive its parent."""
        self.handle_last += 1
        child = self.handle_last
        entries: list[Entry] = [fork_entry(parent, child, token_count)]
        if self.chance.random() < 0.3:
            entries.append(CloseEntry(Handle(parent), CloseReason.FINISHED))
        if self.chance.random() < 0.6:
            entries.append(decode_entry((child, token_count, token_count, self.tokens(1))))
            if self.chance.random() < 0.5:
                entries += self.forks(child, token_count + self.chance.choice((0, 1)))
        return entries

    def entries_for(self, handle: Handle) -> list[Entry]:
        """Draws what happens to a sequence."""
        sequence = self.memory.sequences[handle]
        known, scheduled = len(sequence.token_ids), sequence.scheduled
        choice = self.chance.random()
        if choice < 0.15:
            return [CloseEntry(handle, CloseReason.FINISHED)]
        if choice < 0.35 and scheduled:
            return self.forks(handle, max(1, scheduled - self.chance.choice((0, 0, 0, 1, 2, 5))))
        if known == scheduled and choice < 0.8:
            row = decode_entry((int(handle), scheduled, known, self.tokens(1)))
            return [row, *self.forks(handle, scheduled + 1)] if choice < 0.45 else [row]
        more = self.tokens(self.chance.choice((0, 2, 5)))
        return [extend_entry(int(handle), more, known=known, scheduled=scheduled)]


@pytest.mark.parametrize("seed", range(20))
def test_s16_s22_every_pass_reads_what_its_sequences_wrote(seed: int) -> None:
    """Copies, forks, remaps, failed steps: no slot is overwritten or handed out too early."""
    run = WorkerRun(seed)
    for _ in range(STEP_COUNT):
        run.step()


def test_such_histories_copy_and_remap() -> None:
    """The test above sees what it is about."""
    runs = [WorkerRun(seed) for seed in range(8)]
    for run in runs:
        for _ in range(STEP_COUNT):
            run.step()
    assert sum(run.memory.copied_count for run in runs) > 100
    assert sum(run.memory.remapped_count for run in runs) > 20


@pytest.mark.parametrize("seed", range(12))
def test_s23_every_pass_reads_its_windows(seed: int) -> None:
    """No query reads a window block that was freed, replaced or handed out too early."""
    run = WorkerRun(seed, window_count=1 + seed % 2)
    for _ in range(STEP_COUNT):
        run.step()
        invariants.check(run.pool)
    assert run.memory.freed_count


@pytest.mark.parametrize("seed", range(8))
def test_s23_every_pass_reads_all_of_a_further_full_attention_group(seed: int) -> None:
    """Its blocks are never freed behind a window, whatever other groups there are."""
    run = WorkerRun(seed, window_count=seed % 2, full_count=1 + seed % 3 // 2)
    for _ in range(STEP_COUNT):
        run.step()
        invariants.check(run.pool)
    assert bool(run.memory.freed_count) == bool(seed % 2)
