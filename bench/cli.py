"""The command line of the measurements."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.answers import decode_rate_figures, first_token_figures
from bench.branches import branch_figures
from bench.cascade import cascade_figures
from bench.core import cached_admission_figures, decode_figures, new_admission_figures
from bench.figures import Figure
from bench.hashing import hashing_figures
from bench.kv import kv_figures
from bench.passes import pass_figures
from bench.report import print_table, write_json
from bench.rpc import rpc_figures

GROUPS: dict[str, tuple[Callable[[], list[Figure]], ...]] = {
    "hashing": (hashing_figures,),
    "core": (cached_admission_figures, new_admission_figures, decode_figures, branch_figures),
    "rpc": (rpc_figures,),
    "passes": (pass_figures,),
    "cascade": (cascade_figures,),
    "kv": (kv_figures,),
    "answers": (first_token_figures, decode_rate_figures),
}
"""What can be measured, in order."""

app = typer.Typer(add_completion=False)


def machine_description() -> dict[str, Any]:
    """Says what the figures were taken on, in words."""
    return {
        "cpu_count": os.cpu_count(),
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


@app.command()
def bench(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Measure only this: {', '.join(GROUPS)}.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the JSON file.")] = Path(
        "bench/out/bench.json"
    ),
) -> None:
    """Measures prefixd against baselines of the same run; a missed target is said, not an error."""
    chosen = only or list(GROUPS)
    for name in chosen:
        if name not in GROUPS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(GROUPS)}")
    console = Console()
    figures: list[Figure] = []
    for name in chosen:
        with console.status(f"measuring {name}"):
            for measure in GROUPS[name]:
                figures += measure()
    print_table(figures, console)
    write_json(figures, machine_description(), out)
    console.print(f"written to {out}")


def main() -> None:
    """Runs the command line."""
    app()
