"""Pass runners that put a fault or a gate around the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prefixd.worker.execution import PassRunner
from prefixd.worker.reading import LogitRead, LogitReading
from prefixd.worker.step import PassPlan

R = TypeVar("R", bound=PassRunner)

TIMEOUT_S = 60.0


class Wrapping(Generic[R]):
    """Puts a runner around a worker's own one, and keeps it at hand as `runner`."""

    runner: R

    def __init__(self, make: Callable[[PassRunner], R]) -> None:
        self._make = make

    def __call__(self, inner: PassRunner) -> PassRunner:
        """Wraps the runner of a worker that is being built."""
        self.runner = self._make(inner)
        return self.runner


class PassBroken(RuntimeError):
    """A fault that a test put into a forward pass."""


class FaultyRunner:
    """Breaks the passes that `is_faulty` names by their number from 1.

    Odd ones break before anything is written, even ones when all KV is written and the tokens are
    chosen: either way the pass counts for nothing.
    """

    def __init__(self, inner: PassRunner, is_faulty: Callable[[int], bool]) -> None:
        self._inner = inner
        self._is_faulty = is_faulty
        self.pass_count = 0
        self.broken_count = 0

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Runs the pass, or breaks it."""
        self.pass_count += 1
        if not self._is_faulty(self.pass_count):
            return self._inner.run(plan, reads)
        self.broken_count += 1
        if self.broken_count % 2 == 0:
            self._inner.run(plan, reads)
        raise PassBroken


class GatedRunner:
    """Lets passes through while its gate is open."""

    def __init__(self, inner: PassRunner) -> None:
        self._inner = inner
        self._gate = threading.Event()
        self._gate.set()
        self._waiting = threading.Event()
        self.plans: list[PassPlan] = []

    def close(self) -> None:
        """The next pass waits."""
        self._waiting.clear()
        self._gate.clear()

    def wait_held(self) -> None:
        """Waits until a pass stands at the closed gate."""
        assert self._waiting.wait(TIMEOUT_S)

    def open(self) -> None:
        """Lets the waiting pass and all others through."""
        self._gate.set()

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Runs the pass once the gate is open."""
        self.plans.append(plan)
        if not self._gate.is_set():
            self._waiting.set()
            assert self._gate.wait(TIMEOUT_S)
        return self._inner.run(plan, reads)


class CuttingRunner:
    """Cuts connections during some passes."""

    def __init__(self, inner: PassRunner, cut: Callable[[], int], *, pass_numbers: range) -> None:
        self._inner = inner
        self._cut = cut
        self._pass_numbers = pass_numbers
        self._pass_count = 0
        self.cut_count = 0

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Runs the pass; the connection may be gone when it ends."""
        self._pass_count += 1
        if self._pass_count in self._pass_numbers:
            self.cut_count += self._cut()
        return self._inner.run(plan, reads)


class ObservingRunner:
    """Looks at something before each pass, when its step is planned and not yet computed."""

    def __init__(self, inner: PassRunner, look: Callable[[], int]) -> None:
        self._inner = inner
        self._look = look
        self.seen: list[int] = []

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Looks, then runs the pass."""
        self.seen.append(self._look())
        return self._inner.run(plan, reads)
