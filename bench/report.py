"""Writes figures for people and for programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Figure


def print_table(figures: Sequence[Figure], console: Console) -> None:
    """Prints one line per figure, and says which targets are missed."""
    table = Table(title="prefixd: measured here and now")
    table.add_column("figure", overflow="fold")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("baseline", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:,.1f} {figure.unit}",
            _baseline(figure),
            "" if figure.ratio is None else f"{figure.ratio:.3g}x",
            figure.target_text,
            {None: "", True: "met", False: "[bold red]MISSED[/]"}[figure.met],
        )
    console.print(table)
    missed = [figure.name for figure in figures if figure.met is False]
    if missed:
        console.print(f"[bold red]{len(missed)} targets missed:[/] {'; '.join(missed)}")


def _baseline(figure: Figure) -> str:
    if figure.baseline_value is None:
        return figure.baseline
    return f"{figure.baseline}: {figure.baseline_value:,.1f} {figure.unit}"


def write_json(figures: Sequence[Figure], machine: dict[str, Any], path: Path) -> None:
    """Writes all figures and the machine they were taken on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "figures": [figure.as_json() for figure in figures]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
