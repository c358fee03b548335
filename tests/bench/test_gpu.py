"""The script for GPU machines, tried without a GPU and without an installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import PART_NAMES, link

BARE = Path(__file__).with_name("bare.py")
IMPORT_ALL = Path(__file__).with_name("import_all.py")


def run_bare(*arguments: str | Path, folder: Path, **environment: str) -> str:
    """Run a script without what is no part of a GPU machine; what it prints."""
    names = {"PYTHONPATH", "PYTHONSAFEPATH", "TRITON_INTERPRET"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, BARE, *arguments],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(600)
def test_all_parts_run_without_a_gpu(repository_folder: Path, tmp_path: Path) -> None:
    """Toy sizes, the interpreter, but the same code: every part ends by itself, and is right."""
    script = repository_folder / "bench" / "gpu.py"
    printed = run_bare(
        script, "--device", "cpu", "--tiny", "--out", tmp_path / "out", folder=tmp_path
    )
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert document["passed"] is True
    assert list(PART_NAMES) == [part["name"] for part in document["parts"]]
    assert {"done"} == {part["outcome"] for part in document["parts"]}
    assert all(part["checks"] or part["figures"] for part in document["parts"])
    assert all(f"== {name}: done" in printed for name in PART_NAMES)
    checks = document["parts"][0]["checks"]
    kernels = ["attend narrow", "attend wide", "attend whole", "reduce", "store", "copy"]
    assert kernels * 3 == [check["kernel"] for check in checks]
    assert all(check["passed"] for check in checks)
    assert {"torch", "triton", "transformers", "device"} <= document["machine"].keys()


def test_kernels_and_the_model_side_need_no_installation(tmp_path: Path) -> None:
    """Through links alone, and without the packages that only servers need."""
    link(tmp_path)
    packages = [f"prefixd.{name}" for name in ("kernels", "worker.attention", "worker.model")]
    printed = run_bare(
        IMPORT_ALL,
        *packages,
        "bench.gpu_parts",
        folder=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    modules = printed.split()
    for name in ("kernels.attention", "worker.attention.triton", "worker.model.runner"):
        assert f"prefixd.{name}" in modules
    assert "bench.gpu_parts.command" in modules


def test_without_a_gpu_the_script_says_so(repository_folder: Path, tmp_path: Path) -> None:
    """A CPU runs toy sizes only, and the script does not fall back to it unasked."""
    script = repository_folder / "bench" / "gpu.py"
    done = subprocess.run(
        [sys.executable, script, "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == done.returncode
    assert "add --tiny" in done.stderr
