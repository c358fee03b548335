"""What README.md and CONTRIBUTING.md tell people to type exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from prefixd.clients.cli.main import build

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
VERDICTS = {"same": True, "differs": True, "later": False, "none": False}
"""Verdicts of docs/behaviours.md, and whether they come with tests."""
SERVERS_WITH_OPTIONS_OF_THEIR_OWN = ("controller", "worker", "up")


@pytest.fixture(scope="module", params=DOCUMENTS)
def document(request: pytest.FixtureRequest, repository_folder: Path) -> str:
    """The text of one document."""
    return (repository_folder / request.param).read_text()


def code_lines(document: str) -> list[str]:
    """Return the lines of all fenced code blocks, continued lines joined, comments cut off."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in text.splitlines()]


def test_make_targets_exist(document: str, repository_folder: Path) -> None:
    """Every `make X` of a code block has a rule."""
    rules = re.findall(r"^([a-z-]+):", (repository_folder / "Makefile").read_text(), re.MULTILINE)
    named = [line.split()[1] for line in code_lines(document) if line.startswith("make ")]
    assert named
    assert [] == [target for target in named if target not in rules]


def test_commands_and_their_options_exist(repository_folder: Path) -> None:
    """Every `prefixd X --y` of the README is one that the command line knows."""
    root = typer.main.get_command(build())
    commands = getattr(root, "commands", {})
    lines = code_lines((repository_folder / "README.md").read_text())
    typed = [shlex.split(line)[1:] for line in lines if line.startswith("prefixd ")]
    assert typed
    for name, *arguments in typed:
        assert name in commands, name
        known = {option for parameter in commands[name].params for option in parameter.opts}
        options = {word for word in arguments if re.match(r"--?[a-z]", word)}
        assert name in SERVERS_WITH_OPTIONS_OF_THEIR_OWN or options <= known, (name, options)


def test_grpcurl_recipes_name_methods_that_exist(document: str) -> None:
    """Every `prefixd.v1.Service/Method` is in the generated descriptors."""
    names = re.findall(r"prefixd\.v1\.(\w+)Service/(\w+)", document)
    assert names
    for service, method in names:
        module = importlib.import_module(f"prefixd.v1.{service.lower()}_pb2")
        assert method in module.DESCRIPTOR.services_by_name[f"{service}Service"].methods_by_name


def test_python_examples_use_names_that_exist(repository_folder: Path) -> None:
    """The Python of the README parses, and what it imports can be imported."""
    text = (repository_folder / "README.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [] == [name.name for name in node.names if not hasattr(module, name.name)]


def test_every_behaviour_has_a_verdict_and_is_shown(repository_folder: Path) -> None:
    """docs/behaviours.md has B01 to B57 in order; what is the same or differs names its tests."""
    text = (repository_folder / "docs" / "behaviours.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| (B\d\d .*) \|$", text, re.MULTILINE)]
    assert [f"B{number:02}" for number in range(1, 58)] == [row[0] for row in rows]
    for number, _, verdict, *shown_by in rows:
        assert verdict.rstrip(" |") in VERDICTS, number
        assert bool(shown_by) == VERDICTS[verdict.rstrip(" |")], number


def test_behaviours_name_tests_that_exist(repository_folder: Path) -> None:
    """Every `file::function` of docs/behaviours.md is a test."""
    text = (repository_folder / "docs" / "behaviours.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    for path, name in named:
        tree = ast.parse((repository_folder / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"
