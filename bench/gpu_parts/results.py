"""Prints results for people, and writes them for programs."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.gpu_parts.lines import Check
from bench.gpu_parts.running import PartResult


def write_json(results: Sequence[PartResult], machine: dict[str, Any], path: Path) -> None:
    """Writes what there is by now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine,
        "passed": all(result.passed for result in results),
        "parts": [result.as_json() for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def text_of(result: PartResult) -> str:
    """A part as a few lines of text."""
    head = f"== {result.name}: {result.outcome.value} after {result.taken_s:.1f} s"
    lines = [head, *_check_lines(result.checks), *map(_figure_line, result.figures)]
    if result.error:
        lines.append(f"   {result.error}")
    return "\n".join(lines)


def _check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """One line per kind of layer, and one more for each kernel that failed."""
    for kind, grouped in groupby(checks, key=lambda check: check.kind):
        of_kind = list(grouped)
        refusals = {check.refusal for check in of_kind if check.refusal}
        if refusals:
            yield f"   {kind:32} refused: {'; '.join(sorted(refusals))}"
            continue
        errors = "  ".join(
            f"{check.kernel} {'-' if check.error is None else f'{check.error:.1e}'}"
            for check in of_kind
        )
        failed = [check for check in of_kind if not check.passed]
        yield f"   {kind:32} {'FAILED' if failed else 'right '}  {errors}"
        for check in failed:
            reason = check.failure or f"above {check.error_max:.0e} {check.unit}"
            yield f"      FAILED {check.kernel}: {reason}"


def _figure_line(figure: Figure) -> str:
    parts = [f"   {figure.name:72} {figure.value:10,.2f} {figure.unit:8}"]
    if figure.baseline_value is not None and figure.ratio is not None:
        parts.append(f"{figure.baseline} {figure.baseline_value:,.2f}: {figure.ratio:.2f}x")
    if figure.met is not None:
        parts.append(f"(target {figure.target_text}: {'met' if figure.met else 'MISSED'})")
    return " ".join(parts)
