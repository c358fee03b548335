"""Random histories under policies with bands, whatever else a pool does: what passes read, what
events tell and what invariants say (S16, S19, S20, S22, S25)."""

import random
from dataclasses import replace
from unittest import mock

import pytest

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.limits import RETENTION_MS_MAX, RETENTION_PRIORITY_MAX
from prefixd.controller.core.messages import CloseEntry, Entry, GroupSpec, Handle, OpenEntry
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.core.pool import Pool
from tests.controller.test_group_event_log import WatchedWorker
from tests.model.arbitrary_policy import Arbitrary
from tests.model.watcher import Watcher

STEP_COUNT = 120


class HintedWorker(WatchedWorker):
    """A watched history whose sequences carry hints; some window groups are of full attention."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hints = random.Random(seed)
        groups = list(self.pool.spec.groups)
        full = [at for at in range(1, len(groups)) if self.hints.random() < 0.4]
        for at in full:
            groups[at] = GroupSpec()
        self.memory.windows = tuple(
            None if at in full else window for at, window in enumerate(self.memory.windows)
        )
        spec = replace(
            self.pool.spec,
            block_count=self.hints.choice((8, 14, 30)) * len(groups),
            groups=tuple(groups),
            eviction_policy=self.hints.choice(("arbitrary", "retention")),
        )
        with mock.patch.dict(EVICTION_POLICIES, {"arbitrary": Arbitrary}):
            self.pool = Pool(spec, epoch=1, hasher=Hasher("xxhash_cbor", seed="0"))
        self.watcher = Watcher(self.pool)

    def hint(self) -> RetentionHint:
        """Draws a hint; most of those with an end end soon."""
        return RetentionHint(
            self.hints.choice(list(Continuation)),
            self.hints.choice((0, 0, 1, RETENTION_PRIORITY_MAX)),
            self.hints.choice((0, 0, 1, 3, 20, RETENTION_MS_MAX)),
        )

    def hinted(self, entries: list[Entry]) -> list[Entry]:
        """Gives hints to what opens and closes."""
        return [
            replace(entry, retention_hint=self.hint())
            if isinstance(entry, OpenEntry | CloseEntry)
            else entry
            for entry in entries
        ]

    def opening(self) -> list[Entry]:
        """Draws an open, with a hint."""
        return self.hinted(super().opening())

    def entries_for(self, handle: Handle) -> list[Entry]:
        """Draws what happens to a sequence, with a hint where it is closed."""
        return self.hinted(super().entries_for(handle))


def follow(seed: int) -> HintedWorker:
    """Runs one history."""
    run = HintedWorker(seed)
    for _ in range(STEP_COUNT):
        run.step()
    return run


@pytest.mark.parametrize("seed", range(24))
def test_s19_s20_hints_change_nothing_but_the_order(seed: int) -> None:
    """Passes read what their sequences wrote, events tell what is cached, and nothing is cached
    behind a block that is gone, whatever goes first."""
    assert follow(seed).pool.state.statistics.evicted_block_count


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("first_seed", range(2_000, 2_400, 10))
def test_s19_s20_hints_change_nothing_but_the_order_of_many_histories(first_seed: int) -> None:
    """The same for more seeds; one history in ten may need no eviction."""
    runs = [follow(seed) for seed in range(first_seed, first_seed + 10)]
    assert sum(run.pool.state.statistics.evicted_block_count > 0 for run in runs) >= 9
