"""Durations of work on a device, by the device's own clock where it has one."""

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

Work: TypeAlias = Callable[[], object]
"""Starts work on the device; it need not be done when the call returns."""

FLUSH_BYTE_COUNT = 256 * 1024 * 1024
"""More than the second-level cache of any GPU holds."""
RUNS_BEFORE_CAPTURE = 2
"""The first compiles and loads kernels, which a capture can do neither of."""
WARM_UP_COUNT = 10
"""Runs that are not counted: clocks rise and caches of the host fill."""


class Clock(Protocol):
    """Measures work on one device; every measurement begins with an empty cache."""

    def eager_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """Device time of work whose launches are sent one by one: its gaps count."""
        ...

    def replayed_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """Device time of work whose launches are recorded once and sent together."""
        ...

    def wall_s(self, work: Work) -> float:
        """Time until the device has done the work, as somebody who waits for it sees it."""
        ...


class CudaClock:
    """CUDA events around the work, and CUDA graphs to send it as one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTE_COUNT, dtype=torch.int8, device=device)

    def eager_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """See `Clock`."""
        return self._between_events(work, repeat_count)

    def replayed_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """See `Clock`."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # theirs
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(RUNS_BEFORE_CAPTURE):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return self._between_events(graph.replay, repeat_count)

    def wall_s(self, work: Work) -> float:
        """See `Clock`."""
        self._flush.zero_()
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def _between_events(self, work: Work, repeat_count: int) -> list[float]:
        pairs = []
        for _ in range(WARM_UP_COUNT + repeat_count):
            start, end = _event(), _event()
            self._flush.zero_()
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1_000 for start, end in pairs[WARM_UP_COUNT:]]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # theirs


class HostClock:
    """The CPU, whose work is done when the call returns."""

    def eager_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """See `Clock`."""
        return [self.wall_s(work) for _ in range(repeat_count)]

    def replayed_s(self, work: Work, *, repeat_count: int) -> list[float]:
        """See `Clock`."""
        return self.eager_s(work, repeat_count=repeat_count)

    def wall_s(self, work: Work) -> float:
        """See `Clock`."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
