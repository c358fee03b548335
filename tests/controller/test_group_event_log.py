"""The event log of pools with several KV groups, replayed beside the live table (S25, S23)."""

import contextlib
from collections import Counter

import pytest

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.events import BlocksStored
from tests.controller.test_memory import WorkerRun
from tests.model.watcher import Watcher


class WatchedWorker(WorkerRun):
    """A random history of up to four KV groups and an operator, followed by a watcher."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, window_count=seed % 3, full_count=(seed + 1) % 2)
        self.watcher = Watcher(self.pool)
        self.dropped = Counter[str]()

    def step(self) -> None:
        """Takes a step, perhaps an operator's action, and follows the events."""
        super().step()
        if self.chance.random() < 0.08:
            self.act()
        if self.chance.random() < 0.2:
            self.pool.hash_slice(self.chance.randrange(1, 9))
        invariants.check(self.pool)
        self.watcher.catch_up(count_max=self.chance.choice((1, 3, 100)))
        self.watcher.check()

    def act(self) -> None:
        """Evicts blocks by id or digest, flushes, or bumps the version."""
        kind = self.chance.choice(("ids", "digests", "digests", "flush", "version"))
        match kind:
            case "ids":
                block_ids = set(self.chance.sample(range(1, self.pool.spec.block_count), 3))
                dropped = self.pool.evict_blocks(block_ids=block_ids, digests=frozenset())
                self.dropped[kind] += dropped.block_count
            case "digests":
                self.watcher.catch_up(count_max=100)
                known = sorted({digest for _, digest in self.watcher.parents})
                digests = set(self.chance.sample(known, min(2, len(known))))
                dropped = self.pool.evict_blocks(block_ids=frozenset(), digests=digests)
                assert dropped.block_count >= len(digests)
                self.watcher.catch_up(count_max=100)
                assert digests.isdisjoint(digest for _, digest in self.watcher.parents)
                self.dropped[kind] += dropped.block_count
            case "flush":
                self.flush()
            case _:
                version = self.chance.choice(("", "1", "2"))
                self.dropped[kind] += self.pool.set_model_version(version)

    def flush(self) -> None:
        """Closes nothing, so most flushes are refused."""
        with contextlib.suppress(BlocksInUse):
            self.dropped["flush"] += self.pool.flush()


def follow(seed: int, *, step_count: int) -> WatchedWorker:
    """Runs one history."""
    run = WatchedWorker(seed)
    for _ in range(step_count):
        run.step()
    return run


def test_s25_events_of_all_groups_equal_the_live_table_at_every_point() -> None:
    """One stored per group and digest, one removed; after each step and operator's action."""
    runs = [follow(seed, step_count=100) for seed in range(12)]
    for kind in ("ids", "digests", "version"):
        assert sum(run.dropped[kind] for run in runs) > 25, kind
    stored = Counter(
        event.group_index
        for run in runs
        for event in run.pool.events.after(0, count_max=100_000)
        if isinstance(event, BlocksStored)
    )
    assert min(stored[group_index] for group_index in range(4)) > 50


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(2_000, 2_040))
def test_s25_events_of_very_long_histories_of_groups_equal_the_live_table(seed: int) -> None:
    """The same over 1,000 steps, for more seeds."""
    follow(seed, step_count=1_000)
