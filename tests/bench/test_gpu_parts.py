"""How parts are run, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.figures import Figure
from bench.gpu_parts.lines import Check, Line
from bench.gpu_parts.results import text_of, write_json
from bench.gpu_parts.running import Outcome, Part, PartResult, run_part, run_parts

FIGURE = Figure("copy", 4_000.0, "GB/s")
RIGHT = Check("store", "64 bf16", error=1e-3, error_max=1e-2)


def part(*lines: Line | Exception, limit_s: float = 60.0) -> Part:
    """A part that gives lines, or raises."""

    def run() -> Iterator[Line]:
        for line in lines:
            if isinstance(line, Exception):
                raise line
            yield line

    return Part("part", limit_s, run)


def test_a_part_that_raises_keeps_what_it_gave() -> None:
    """Its error is its result; the parts behind it run."""
    seen: list[int] = []
    results = run_parts(
        [part(FIGURE, ValueError("no such kernel")), part(RIGHT)],
        each=lambda so_far: seen.append(len(so_far)),
    )
    broken, whole = results
    assert (Outcome.FAILED, "ValueError: no such kernel") == (broken.outcome, broken.error)
    assert [FIGURE] == broken.figures
    assert not broken.passed
    assert whole.passed
    assert [1, 2] == seen


def test_a_part_is_cut_short_at_its_limit() -> None:
    """It is asked for no further line, and that is no failure."""
    result = run_part(part(FIGURE, ValueError("never reached"), limit_s=0.0))
    assert Outcome.CUT_SHORT == result.outcome
    assert result.passed


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check("k", "64", error=1.0, error_max=1.0), True),
        (Check("k", "64", error=1.1, error_max=1.0), False),
        (Check("k", "64", error=float("nan"), error_max=1.0), False),
        (Check("k", "64", error=0.0, failure="does not compile"), False),
        (Check("k", "64"), False),
        (Check("k", "64", refusal="too old"), None),
    ],
)
def test_a_check_passes_by_its_error_alone(check: Check, passed: bool | None) -> None:
    """Nothing measured and NaN are failures; a refusal is neither."""
    assert passed is check.passed
    assert (passed is not False) is run_part(part(check)).passed


def test_a_missed_target_is_no_failure() -> None:
    """It is said in the table."""
    missed = Figure("decode", 1.0, "GB/s", "copy", 2.0, 0.5, target=0.7, at_least=True)
    result = run_part(part(missed))
    assert result.passed
    assert "MISSED" in text_of(result)


def test_failures_are_told_by_kernel() -> None:
    """The line of the kind is marked, and each kernel that is wrong has a line of its own."""
    wrong = Check("reduce", "64 bf16", error=0.5, error_max=1e-2, unit="of a row")
    refused = Check("store", "64 fp8", refusal="too old")
    lines = text_of(run_part(part(RIGHT, wrong, refused))).splitlines()
    assert "FAILED" in lines[1]
    assert "FAILED reduce: above 1e-02 of a row" in lines[2]
    assert "refused: too old" in lines[3]


def test_json_holds_every_line_and_the_verdict(tmp_path: Path) -> None:
    """One file, written anew as results come in."""
    path = tmp_path / "out" / "gpu.json"
    results = [run_part(part(RIGHT, FIGURE)), PartResult("late", outcome=Outcome.FAILED, error="x")]
    for count in (1, 2):
        write_json(results[:count], {"torch": "2.11"}, path)
        assert (count == 1) is json.loads(path.read_text())["passed"]
    document = json.loads(path.read_text())
    assert {"torch": "2.11"} == document["machine"]
    assert ["part", "late"] == [one["name"] for one in document["parts"]]
    assert 1e-3 == document["parts"][0]["checks"][0]["error"]
    assert "copy" == document["parts"][0]["figures"][0]["name"]
