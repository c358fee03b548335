"""Long random histories of the core beside the naive model, in larger pools."""

from collections import Counter

import pytest

from prefixd.controller.core.messages import (
    DecodeOutcome,
    ExtendOutcome,
    ForkOutcome,
    OpenOutcome,
    Refusal,
)
from tests.model.fuzz import Run, run_seed


class CountedRun(Run):
    """Counts what happens in the groups behind the first."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.counts = Counter[str]()

    def step(self) -> None:
        """Takes a step and counts what its reply has."""
        super().step()
        reply = self.model.replies[self.model.applied_step_id]
        self.counts["cut"] += len(reply.cut_sequences)
        self.counts["remap"] += sum(remap.group_index > 0 for remap in reply.remaps)
        self.counts["twin"] += len(self.model.window_twins)
        for outcome in reply.outcomes:
            match outcome:
                case OpenOutcome(plan) | ExtendOutcome(plan) | ForkOutcome(plan):
                    freed, copies = plan.freed_blocks, plan.copies
                case DecodeOutcome():
                    freed, copies = outcome.freed_blocks, outcome.copies
                case Refusal():
                    self.counts[outcome.reason] += 1
                    continue
                case _:
                    continue
            self.counts["freed"] += len(freed)
            self.counts["copy"] += sum(copy.group_index > 0 for copy in copies)


@pytest.mark.parametrize("seed", range(12))
def test_long_history_equals_the_model(seed: int) -> None:
    """Replies, free order, tables, digests and counters agree after each of 250 steps."""
    run_seed(seed, step_count=250)


def test_s23_such_histories_see_what_window_groups_do() -> None:
    """Blocks are freed, copied, twins, remapped; entries refused, and tables cut, in such pools."""
    runs = [run for seed in range(100, 132) if (run := CountedRun(seed)).shape.windows]
    counts = Counter[str]()
    for run in runs:
        for _ in range(80):
            run.step()
        counts += run.counts
    assert counts["freed"] > 100
    assert min(counts[one] for one in ("copy", "twin", "remap", "cut", "POOL_EXHAUSTED")) > 10


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(1_000, 1_100))
def test_very_long_history_equals_the_model(seed: int) -> None:
    """The same over 1,500 steps, for more seeds."""
    run_seed(seed, step_count=1_500)
