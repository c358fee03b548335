"""The recipes of clients/grpcurl/README.md, run as they stand against a real controller."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import controller_process

FENCE = re.compile(r"^```(?P<kind>sh|json|text)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "=== recipe ==="
ANY = "..."


@dataclass(frozen=True)
class Recipe:
    """Shell lines of the page, and the sample of their output behind them."""

    commands: str
    sample_kind: str
    sample: str


def recipes_of(page: str) -> list[Recipe]:
    """All shell blocks of the page, each with the sample that follows it, if one does."""
    recipes: list[Recipe] = []
    for fence in FENCE.finditer(page):
        kind, body = fence["kind"], fence["body"]
        if kind == "sh":
            recipes.append(Recipe(body, "", ""))
        else:
            recipes[-1] = Recipe(recipes[-1].commands, kind, body)
    return recipes


def differences(sample: Any, real: Any, path: str = "") -> Iterator[str]:
    """Where the real JSON lacks what the sample shows; "..." stands for anything."""
    if sample == ANY and real:
        return
    if isinstance(sample, dict) and isinstance(real, dict):
        for name, value in sample.items():
            yield from differences(value, real.get(name), f"{path}.{name}")
    elif isinstance(sample, list) and isinstance(real, list) and len(sample) == len(real):
        for index, value in enumerate(sample):
            yield from differences(value, real[index], f"{path}[{index}]")
    elif sample != real:
        yield f"{path}: the page shows {sample!r}, grpcurl printed {real!r}"


def run_page(recipes: list[Recipe], environment: dict[str, str]) -> list[str]:
    """Runs all recipes in one shell; returns what each printed."""
    script = "".join(f"{recipe.commands}\necho '{MARK}'\n" for recipe in recipes)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split(MARK + "\n")[:-1]


def test_every_recipe_prints_what_its_page_shows(repository_folder: Path, tmp_path: Path) -> None:
    """The page's commands work with the real grpcurl, in order, TCP and unix socket alike."""
    folder = Path(sys.executable).parent
    if not (folder / "grpcurl").exists():
        pytest.skip("grpcurl is not installed beside this Python")
    page = (repository_folder / "clients/grpcurl/README.md").read_text(encoding="utf-8")
    recipes = recipes_of(page)
    socket = tmp_path / "prefixd.sock"
    with controller_process("--listen", "127.0.0.1:0", "--listen", f"unix:{socket}") as controller:
        environment = {
            "CONTROLLER": controller.address,
            "SOCKET": str(socket),
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        outputs = run_page(recipes, environment)
    assert len(recipes) == len(outputs)
    for recipe, output in zip(recipes, outputs, strict=True):
        if recipe.sample_kind == "json":
            assert [] == list(differences(json.loads(recipe.sample), json.loads(output)))
        for line in recipe.sample.splitlines() if recipe.sample_kind == "text" else ():
            assert line in output


def test_a_sample_that_differs_is_found() -> None:
    """The comparison of samples can fail: in a value, in a list's length, in a missing name."""
    real = {"blockIds": [1, 2], "epoch": "7"}
    assert [] == list(differences({"blockIds": [1, 2], "epoch": ANY}, real))
    assert len(list(differences({"blockIds": [1, 3]}, real))) == 1
    assert len(list(differences({"blockIds": [1]}, real))) == 1
    assert len(list(differences({"revision": ANY}, real))) == 1
