"""The event log of long random histories, replayed beside the live table (S25)."""

import pytest

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.messages import BlockId
from tests.model.compare import assert_equal_tables
from tests.model.eviction import evict
from tests.model.fuzz import Run
from tests.model.watcher import Watcher


class WatchedRun(Run):
    """A random history with everything that an operator can do between its steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.watcher = Watcher(self.pool)
        self.evicted_count = self.flushed_count = self.bumped_count = 0

    def step(self) -> None:
        """Takes a step, perhaps an operator's action, and follows the events."""
        super().step()
        if self.rarely(0.08):
            self.act()
            invariants.check(self.pool)
            assert_equal_tables(self.pool, self.model)
        self.watcher.catch_up(count_max=self.chance.choice((1, 3, 100)))
        self.watcher.check()

    def act(self) -> None:
        """Evicts, flushes or bumps the version, on both sides."""
        kind = self.chance.choice(("evict", "evict", "evict", "flush", "version"))
        if kind == "evict":
            self.evict()
        elif kind == "flush":
            self.flush()
        elif self.rarely(0.6):
            version = self.chance.choice(("", "1", "2"))
            dropped = self.pool.set_model_version(version)
            assert dropped == self.model.set_model_version(version)
            self.bumped_count += 1

    def evict(self) -> None:
        """Evicts a few blocks by id, whatever they hold."""
        count = self.chance.choice((1, 1, 2, 5))
        blocks = self.chance.sample(range(1, self.shape.block_count), count)
        dropped = self.pool.evict_blocks(block_ids=set(blocks), digests=frozenset())
        expected = evict(self.model, {BlockId(block) for block in blocks})
        assert (dropped.block_count, dropped.held_block_count) == expected
        self.evicted_count += dropped.block_count

    def flush(self) -> None:
        """Closes nothing, so most flushes are refused."""
        try:
            dropped = self.model.flush()
        except BlocksInUse:
            with pytest.raises(BlocksInUse):
                self.pool.flush()
            return
        assert self.pool.flush() == dropped
        self.flushed_count += 1


def follow(seed: int, *, step_count: int) -> WatchedRun:
    """Runs one history."""
    run = WatchedRun(seed)
    for _ in range(step_count):
        run.step()
    run.look()
    return run


def test_s25_events_replayed_equal_the_live_table_at_every_point() -> None:
    """After each step and each operator's action, evictions by name included."""
    runs = [follow(seed, step_count=150) for seed in range(24)]
    assert sum(run.evicted_count for run in runs) > 100
    assert sum(run.flushed_count for run in runs) > 0
    assert sum(run.bumped_count for run in runs) > 0
    assert sum(run.watcher.revision for run in runs) > 1_000


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(2_000, 2_060))
def test_s25_events_of_very_long_histories_equal_the_live_table(seed: int) -> None:
    """The same over 1,000 steps, for more seeds."""
    follow(seed, step_count=1_000)
