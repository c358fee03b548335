"""The example engine, run as its page says: on the generated protos alone."""

import ast
import subprocess
import sys
from pathlib import Path

from prefixd.clients import Connection, ControllerClient
from tests.support.controller import controller_process

EXAMPLE = Path("clients/example_engine.py")


def test_example_engine_answers_right_through_shared_blocks(repository_folder: Path) -> None:
    """Both answer as if computed anew, the second on blocks 1 and 2 of the first (S10)."""
    with controller_process() as controller:
        done = subprocess.run(
            [sys.executable, str(repository_folder / EXAMPLE), controller.address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "sequence 1: 0 cached tokens, blocks [1, 2, 3, 6], answer right"
        assert lines[1] == "sequence 2: 8 cached tokens, blocks [1, 2, 4, 5, 7], answer right"
        with ControllerClient(Connection(controller.address)) as client:
            assert [] == list(client.pools())


def test_example_engine_needs_only_the_generated_protos(repository_folder: Path) -> None:
    """It imports neither the worker nor the client library."""
    tree = ast.parse((repository_folder / EXAMPLE).read_text(encoding="utf-8"))
    imported = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert {"prefixd.v1"} == {name for name in imported if name.startswith("prefixd")}
