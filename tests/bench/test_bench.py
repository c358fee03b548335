"""What the report of the measurements is made of."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.figures import Figure
from bench.measure import Samples, Timed, in_turns, ratio_of
from bench.report import print_table, write_json

FAST = Figure("fast", 50, "us", baseline="slow", baseline_value=100, ratio=0.5, target=0.7)
SLOW = Figure("slow", 100, "us", baseline="fast", baseline_value=50, ratio=2.0, target=0.7)


def test_target_bounds_the_ratio_from_above() -> None:
    """A ratio under its target meets it, one above misses it."""
    assert FAST.met is True
    assert SLOW.met is False


def test_target_may_bound_the_value_or_be_a_least_one() -> None:
    """The same figure is judged by what its target is of."""
    assert Figure("x", 50, "us", target=60, target_of="value").met is True
    assert Figure("x", 50, "us", ratio=3, target=2, at_least=True).met is True
    assert Figure("x", 50, "us", ratio=1, target=2, at_least=True).met is False


def test_figure_without_target_is_neither_met_nor_missed() -> None:
    """No target, no verdict."""
    assert Figure("x", 1, "us").met is None


def test_ratio_is_taken_pair_by_pair() -> None:
    """A disturbance that hits one pair does not move the median of the ratios."""
    above, below = Samples((10.0, 900.0, 10.0)), Samples((5.0, 450.0, 5.0))
    assert ratio_of(above, below) == 2.0


def test_calls_are_measured_in_turns() -> None:
    """Every round prepares, measures and settles each call, warm-up rounds included."""
    seen: list[str] = []
    samples = in_turns(
        {
            name: Timed(
                lambda name=name: seen.append(name),
                prepare=lambda name=name: seen.append(f"prepare {name}"),
                settle=lambda name=name: seen.append(f"settle {name}"),
            )
            for name in ("a", "b")
        },
        round_count=2,
        warm_up_count=1,
    )
    assert seen == ["prepare a", "a", "settle a", "prepare b", "b", "settle b"] * 3
    assert [len(taken.durations_us) for taken in samples.values()] == [2, 2]


def test_missed_target_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The table flags it and a line under the table names it."""
    print_table([FAST, SLOW], Console(width=120))
    output = capsys.readouterr().out
    assert "MISSED" in output
    assert "1 targets missed: slow" in output


def test_json_holds_machine_and_verdicts(tmp_path: Path) -> None:
    """A program can read what was measured, on what, and whether it was enough."""
    path = tmp_path / "out" / "bench.json"
    write_json([FAST, SLOW], {"cpu_count": 2}, path)
    document = json.loads(path.read_text())
    assert document["machine"] == {"cpu_count": 2}
    assert [figure["met"] for figure in document["figures"]] == [True, False]
