"""Starts the processes of the tests that run kernels in triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND_TESTS = (
    "tests/worker/attention/test_backends.py",
    "tests/worker/attention/test_families.py",
    "tests/worker/model/test_guard.py",
)


def run_interpreted(folder: Path, *arguments: str) -> None:
    """Run pytest with triton's interpreter and check that some tests ran and all passed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=1700", *arguments],
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, f"{run.stdout[-20_000:]}\n{run.stderr[-2_000:]}"
    assert re.search(r"\b[1-9]\d* passed", run.stdout), run.stdout


@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter(pytestconfig: pytest.Config, repository_folder: Path) -> None:
    """Every test of tests/kernels/interpreted passes, in the selection of this run."""
    selection = pytestconfig.getoption("markexpr") or "slow or not slow"
    run_interpreted(repository_folder, "tests/kernels/interpreted", "-m", selection)


@pytest.mark.timeout(1800)
def test_the_backend_in_the_interpreter(repository_folder: Path) -> None:
    """The backend passes its contract with all traits at once, and the guard with its refusals."""
    selection = "triton and (everything or gemma2 or refuses)"
    run_interpreted(repository_folder, *BACKEND_TESTS, "-k", selection)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_contract_of_the_backend_in_the_interpreter(repository_folder: Path) -> None:
    """The backend passes every test of the contract, and the probe of every served family."""
    tests = (*BACKEND_TESTS, "tests/worker/attention/test_kv_formats.py")
    run_interpreted(repository_folder, *tests, "-k", "triton")
