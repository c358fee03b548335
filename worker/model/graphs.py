"""Recording the work of a device once, to start all of it at once ever after."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UP_COUNT = 2
"""Runs before a recording: the first compiles kernels and takes work space for good."""
CONTEXT_TOKEN_COUNTS = (4_096, 16_384, 65_536, 262_144, 1_048_576)
"""Contexts that recordings are made for: each launches what the longest would need."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Starts all of it on the memory that it was recorded with."""
        ...


class GraphRecorder(Protocol):
    """Records work that reads and writes the same memory every time, and nothing of the host."""

    def record(self, run: Callable[[], None]) -> Graph:
        """Runs the work a few times, then records it; its results may count for nothing."""
        ...

    def mark(self) -> None:
        """Notes that all work started so far is what `wait` is to wait for."""
        ...

    def wait(self) -> None:
        """Waits until the work before the last mark is done."""
        ...


class CudaGraphRecorder:
    """Records CUDA graphs; all of one recorder take their work space from one memory pool.

    Invariants: graphs of one recorder run one after the other, so they can share that memory; all
    are recorded on one stream, without which they would not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # theirs
            self._marked = torch.cuda.Event()  # type: ignore[no-untyped-call] # theirs

    def record(self, run: Callable[[], None]) -> Graph:
        """See `GraphRecorder`."""
        # A recording that fails leaves its stream in place, so ours is put back in any case.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_COUNT):
                    run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            recording = torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
            try:
                with _without_collection(), recording:
                    run()
            except RuntimeError:
                self._abandon()
                raise
        return graph

    def _abandon(self) -> None:
        """Ends a recording that failed for torch's allocator, too.

        torch before 2.12 leaves it waiting for the end, in which state it gives no memory back;
        later releases raise, for there is nothing left to end.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def mark(self) -> None:
        """See `GraphRecorder`."""
        with torch.cuda.device(self._device):
            self._marked.record()

    def wait(self) -> None:
        """See `GraphRecorder`."""
        self._marked.synchronize()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps the garbage collector still: what it destroys must not end up in a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """What a recording of a pass of decode holds.

    Attributes:
        row_count: sequences, one row each; those that a pass lacks are padding.
        context_token_count_max: the longest context.
    """

    row_count: int
    context_token_count_max: int


def row_counts(row_count_max: int) -> tuple[int, ...]:
    """Row counts that passes are padded to: 1, 2, 4, then steps of 8, of 16 beyond 64, of 32
    beyond 256; the last is ``row_count_max``.
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, row_count_max, 32)]
    return (*(count for count in steps if count < row_count_max), row_count_max)


def context_token_counts(context_token_count_max: int) -> tuple[int, ...]:
    """Context lengths that recordings are made for; the last is ``context_token_count_max``."""
    below = [count for count in CONTEXT_TOKEN_COUNTS if count < context_token_count_max]
    return (*below, context_token_count_max)
