"""Starts the process of the tests that run kernels in triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter(pytestconfig: pytest.Config, repository_folder: Path) -> None:
    """Every test of tests/kernels/interpreted passes, in the selection of this run."""
    command = [sys.executable, "-m", "pytest", "tests/kernels/interpreted", "-q", "-m"]
    command.append(pytestconfig.getoption("markexpr") or "slow or not slow")
    run = subprocess.run(
        command,
        cwd=repository_folder,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, f"{run.stdout[-20_000:]}\n{run.stderr[-2_000:]}"
    assert re.search(r"\d+ passed", run.stdout), run.stdout
