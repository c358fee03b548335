"""A random model of a billion parameters: steps of decode, and times to first token."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.figures import Figure
from bench.gpu_parts.clock import Clock, Work
from bench.gpu_parts.random_model import Prompt, RandomModel, first_token, next_tokens
from prefixd.worker.model.forward import Chunk, flatten
from prefixd.worker.model.graphs import CudaGraphRecorder, Graph, GraphRecorder
from prefixd.worker.model.runner import ModelRunner

DISTANCE_MAX = 2e-2
"""Largest distance of recorded logits from eager ones, relative to the latter's length."""

_WARM_UP_COUNT = 2


def decode_steps(random: RandomModel, clock: Clock) -> Iterator[Figure]:
    """Measures steps of decode from recordings, against the same steps launched one by one.

    Tokens are drawn within the step, and wanted on the host as the engine wants them.
    """
    sizes = random.sizes
    recorded = random.recorded(_recorder_for(random.device))
    for count in sizes.decode_counts:
        rows = _rows(random, count)
        _assert_alike(random.eager, recorded, rows)
        replayed_s, eager_s = (
            _median_s(clock, partial(next_tokens, runner, rows), sizes.step_repeat_count)
            for runner in (recorded, random.eager)
        )
        yield Figure(
            f"decode step of {count} x {sizes.decode_context_token_count:,} tokens, recorded",
            replayed_s * 1e3,
            "ms",
            baseline="eager",
            baseline_value=eager_s * 1e3,
            ratio=eager_s / replayed_s,
        )


def first_tokens(random: RandomModel, clock: Clock) -> Iterator[Figure]:
    """Measures the time to first token with nothing cached, against the prefix cached."""
    sizes, runner = random.sizes, random.eager
    for shared in sizes.shared_token_counts:
        count = shared + sizes.own_token_count
        (table,) = random.tables(1, count)
        prompt = Prompt(random.tokens(count), table)
        whole = prompt.chunks(0, chunk_token_count=sizes.chunk_token_count)
        own = prompt.chunks(shared, chunk_token_count=sizes.chunk_token_count)
        cold_s = _median_s(clock, partial(first_token, runner, whole), sizes.cold_repeat_count)
        warm_s = _median_s(clock, partial(first_token, runner, own), sizes.warm_repeat_count)
        yield Figure(
            f"time to first token, {shared:,} shared and {sizes.own_token_count} own, cold",
            cold_s * 1e3,
            "ms",
            baseline="warm",
            baseline_value=warm_s * 1e3,
            ratio=cold_s / warm_s,
        )


def _rows(random: RandomModel, count: int) -> list[Chunk]:
    """The next token of each of so many sequences."""
    context = random.sizes.decode_context_token_count
    prompts = [Prompt([1] * context, table) for table in random.tables(count, context)]
    return [prompt.chunk(context - 1, context) for prompt in prompts]


def _assert_alike(eager: ModelRunner, recorded: ModelRunner, rows: Sequence[Chunk]) -> None:
    """What is fast is not fast by leaving something out."""
    expected = eager.run(flatten(rows)).clone()
    distance = float((recorded.run(flatten(rows)) - expected).norm() / expected.norm())
    assert distance <= DISTANCE_MAX, f"recorded logits are {distance:.1e} off"


def _median_s(clock: Clock, work: Work, repeat_count: int) -> float:
    for _ in range(_WARM_UP_COUNT):
        work()
    return statistics.median(clock.wall_s(work) for _ in range(repeat_count))


@dataclass(frozen=True, slots=True)
class _HostGraph:
    """Work that is done again."""

    run: Callable[[], None]

    def replay(self) -> None:
        """See `Graph`."""
        self.run()


class _HostRecorder:
    """Records nothing: where there is no GPU, a replay is another run."""

    def record(self, run: Callable[[], None]) -> Graph:
        """See `GraphRecorder`."""
        run()
        return _HostGraph(run)

    def mark(self) -> None:
        """See `GraphRecorder`."""

    def wait(self) -> None:
        """See `GraphRecorder`."""


def _recorder_for(device: torch.device) -> GraphRecorder:
    return CudaGraphRecorder(device) if device.type == "cuda" else _HostRecorder()
