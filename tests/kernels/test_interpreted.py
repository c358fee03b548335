"""Starts the processes of the tests that run kernels in triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

BACKEND_TESTS = (
    "tests/worker/attention/test_backends.py",
    "tests/worker/attention/test_families.py",
    "tests/worker/model/test_guard.py",
)


BACKEND_SELECTION = "triton and (everything or gemma2 or refuses)"


class Interpreted:
    """A run of pytest with triton's interpreter, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--timeout=1700", *arguments],
            cwd=folder,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check(self) -> None:
        """Waits for its end and checks that some tests ran and all passed."""
        output, _ = self._process.communicate()
        assert 0 == self._process.returncode, output[-20_000:]
        assert re.search(r"\b[1-9]\d* passed", output), output

    def close(self) -> None:
        """Ends it, if it still runs; again is harmless."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass(frozen=True)
class Runs:
    """What runs side by side: each takes long, and most machines have two cores."""

    kernels: Interpreted
    backend: Interpreted


@pytest.fixture(scope="module")
def runs(pytestconfig: pytest.Config, repository_folder: Path) -> Iterator[Runs]:
    """The kernels' tests in the selection of this run, and the backend's most telling ones."""
    selection = pytestconfig.getoption("markexpr") or "slow or not slow"
    with (
        closing(
            Interpreted(repository_folder, "tests/kernels/interpreted", "-m", selection)
        ) as kernels,
        closing(Interpreted(repository_folder, *BACKEND_TESTS, "-k", BACKEND_SELECTION)) as backend,
    ):
        yield Runs(kernels, backend)


@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter(runs: Runs) -> None:
    """Every test of tests/kernels/interpreted passes, in the selection of this run."""
    runs.kernels.check()


@pytest.mark.timeout(1800)
def test_the_backend_in_the_interpreter(runs: Runs) -> None:
    """The backend passes its contract with all traits at once, and the guard with its refusals."""
    runs.backend.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_contract_of_the_backend_in_the_interpreter(repository_folder: Path) -> None:
    """The backend passes every test of the contract, and the probe of every served family."""
    tests = (*BACKEND_TESTS, "tests/worker/attention/test_kv_formats.py")
    with closing(Interpreted(repository_folder, *tests, "-k", "triton")) as run:
        run.check()
