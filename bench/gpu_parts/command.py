"""Puts the parts together and runs those that are asked for."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.gpu_parts.clock import Clock, clock_for
from bench.gpu_parts.lines import Line
from bench.gpu_parts.machine import machine_description
from bench.gpu_parts.results import text_of, write_json
from bench.gpu_parts.running import Part, PartResult, run_parts
from bench.gpu_parts.sizes import Sizes

if TYPE_CHECKING:
    from bench.gpu_parts.random_model import RandomModel

JSON_NAME = "gpu.json"
_CHECK_LIMIT_S = 90.0


class Parts:
    """The parts of one run.

    Each imports what it is about when it runs, so that what cannot be imported stops no other.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device

    def all(self) -> list[Part]:
        """In order; together they take less than five minutes."""
        return [
            Part("correctness", _CHECK_LIMIT_S, self._correctness),
            Part("decode", 50, self._decode),
            Part("shared", 20, self._shared),
            Part("prefill", 20, self._prefill),
            Part("steps", 50, self._steps),
            Part("first-tokens", 50, self._first_tokens),
        ]

    @cached_property
    def _clock(self) -> Clock:
        return clock_for(self._device)

    @cached_property
    def _random(self) -> "RandomModel":
        from bench.gpu_parts.random_model import RandomModel

        return RandomModel(self._sizes.model, self._device)

    def _correctness(self) -> Iterator[Line]:
        from bench.gpu_parts.correctness import correctness

        return correctness(self._sizes.checks, self._device, limit_s=_CHECK_LIMIT_S)

    def _decode(self) -> Iterator[Line]:
        from bench.gpu_parts.decode import decode_bandwidth

        return decode_bandwidth(self._sizes.attention, self._device, self._clock)

    def _shared(self) -> Iterator[Line]:
        from bench.gpu_parts.decode import shared_prefix

        return shared_prefix(self._sizes.attention, self._device, self._clock)

    def _prefill(self) -> Iterator[Line]:
        from bench.gpu_parts.prefill import prefill_rate

        return prefill_rate(self._sizes.attention, self._device, self._clock)

    def _steps(self) -> Iterator[Line]:
        from bench.gpu_parts.answers import decode_steps

        return decode_steps(self._random, self._clock)

    def _first_tokens(self) -> Iterator[Line]:
        from bench.gpu_parts.answers import first_tokens

        return first_tokens(self._random, self._clock)


def run(sizes: Sizes, device: torch.device, *, names: Sequence[str], out: Path) -> int:
    """Runs parts, prints each as it ends, and writes all so far; returns the exit status.

    Args:
        sizes: how large everything is.
        device: where it runs.
        names: the parts to run; none: all.
        out: the folder of the JSON file.
    """
    machine = machine_description(device)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))

    def each(results: list[PartResult]) -> None:
        print(text_of(results[-1]), flush=True)
        write_json(results, machine, out / JSON_NAME)

    chosen = [part for part in Parts(sizes, device).all() if not names or part.name in names]
    results = run_parts(chosen, each=each)
    failed = [result.name for result in results if not result.passed]
    print(f"written to {out / JSON_NAME}; {'FAILED: ' + ', '.join(failed) if failed else 'right'}")
    return 1 if failed else 0
