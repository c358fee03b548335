"""Paired timing: what is compared is measured in turns, so that noise hits both sides alike.

Calls inside this process are measured in processor time of their thread: a neighbour that takes the
processor away does not count, one that fills its caches does.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """One call to be measured: `prepare` runs before it and `settle` after it, both unmeasured."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    settle: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Samples:
    """Durations of one call, in microseconds, in the order they were taken."""

    durations_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The middle duration."""
        return statistics.median(self.durations_us)

    def percentile_us(self, percent: int) -> float:
        """The duration that this percentage of all calls does not exceed."""
        ordered = sorted(self.durations_us)
        return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def ratio_of(numerator: Samples, denominator: Samples) -> float:
    """Returns the median of the ratios of calls that were measured next to each other."""
    return statistics.median(
        above / below
        for above, below in zip(numerator.durations_us, denominator.durations_us, strict=True)
    )


@contextmanager
def without_collection() -> Iterator[None]:
    """Keeps the garbage collector still, so that no single sample pays for all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(
    calls: Mapping[str, Timed], *, round_count: int, warm_up_count: int
) -> dict[str, Samples]:
    """Runs every call once per round, in turns, and returns the samples behind the warm-up."""
    durations: dict[str, list[float]] = {name: [] for name in calls}
    with without_collection():
        for number in range(warm_up_count + round_count):
            for name, timed in calls.items():
                timed.prepare()
                started = time.thread_time_ns()
                timed.call()
                ended = time.thread_time_ns()
                timed.settle()
                if number >= warm_up_count:
                    durations[name].append((ended - started) / 1_000)
    return {name: samples_of(taken) for name, taken in durations.items()}


def samples_of(durations_us: Sequence[float]) -> Samples:
    """Makes samples of durations."""
    return Samples(tuple(durations_us))
