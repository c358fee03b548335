"""Runs parts one after the other, each within its time, and keeps what each gave."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.figures import Figure
from bench.gpu_parts.lines import Check, Line


class Outcome(Enum):
    """How a part ended."""

    DONE = "done"
    CUT_SHORT = "cut short"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Part:
    """Something to check or measure.

    Attributes:
        name: what it is called on the command line.
        limit_s: once it took so long, it is asked for no further line.
        lines: does the work, line by line.
    """

    name: str
    limit_s: float
    lines: Callable[[], Iterator[Line]]


@dataclass(slots=True)
class PartResult:
    """What a part gave until it ended.

    Attributes:
        name: of the part.
        lines: in order.
        outcome: how it ended.
        error: why, where it failed.
        trace: where, for whoever looks into it.
        taken_s: how long it took.
    """

    name: str
    lines: list[Line] = field(default_factory=list)
    outcome: Outcome = Outcome.DONE
    error: str = ""
    trace: str = ""
    taken_s: float = 0.0

    @property
    def checks(self) -> list[Check]:
        """Its checks."""
        return [line for line in self.lines if isinstance(line, Check)]

    @property
    def figures(self) -> list[Figure]:
        """Its figures."""
        return [line for line in self.lines if isinstance(line, Figure)]

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong; a missed target is not, nor is a part that was cut short."""
        return self.outcome is not Outcome.FAILED and all(
            check.passed is not False for check in self.checks
        )

    def as_json(self) -> dict[str, Any]:
        """The result for a JSON file."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "passed": self.passed,
            "error": self.error,
            "trace": self.trace,
            "taken_s": round(self.taken_s, 3),
            "checks": [check.as_json() for check in self.checks],
            "figures": [figure.as_json() for figure in self.figures],
        }


def run_part(part: Part) -> PartResult:
    """Runs a part to its end or its limit; whatever it raises is its result."""
    result = PartResult(part.name)
    start_s = time.monotonic()
    try:
        for line in part.lines():
            result.lines.append(line)
            if time.monotonic() - start_s > part.limit_s:
                result.outcome = Outcome.CUT_SHORT
                break
    except Exception as error:
        result.outcome = Outcome.FAILED
        result.error = f"{type(error).__name__}: {error}"
        result.trace = traceback.format_exc()
    result.taken_s = time.monotonic() - start_s
    return result


def run_parts(
    parts: Sequence[Part], *, each: Callable[[list[PartResult]], None]
) -> list[PartResult]:
    """Runs all parts; ``each`` gets what there is after every one of them."""
    results: list[PartResult] = []
    for part in parts:
        results.append(run_part(part))
        each(results)
    return results
