"""The process's clock, which the core gets its time from."""

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Says how many milliseconds have passed since some fixed moment; never goes back."""


def monotonic_ms() -> int:
    """The clock of a running controller."""
    return time.monotonic_ns() // 1_000_000
