"""Every family that is served whole is split rightly, or refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import FAMILIES

pytestmark = pytest.mark.slow  # two processes, and some two minutes

REASONS = (
    "transformers has no tensor parallel plan for it",
    "transformers' tensor parallel plan for it does not split its KV heads",
    "cannot be split evenly over 2 ranks",
)
WRONG = {"gemma3n_text"}
"""Families whose plan computes something else."""


def write_families(folder: Path) -> list[Path]:
    """A random model of each family that the installed transformers has."""
    auto_model: Any = AutoModelForCausalLM
    folders = []
    for name, family in FAMILIES.items():
        try:
            config = family.config()
        except pytest.skip.Exception:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            auto_model.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
        folders.append(folder / name)
    return folders


def start(rank: int, port: str, folders: Sequence[Path]) -> subprocess.Popen[str]:
    """One rank in a process of its own."""
    module = "tests.worker.parallel.splitting"
    return subprocess.Popen(
        [sys.executable, "-m", module, str(rank), port, *map(str, folders)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(900)
def test_families_are_split_rightly_or_refused(tmp_path: Path) -> None:
    """What the plan says is compared in numbers; a plan that splits wrongly is found."""
    folders = write_families(tmp_path)
    with start(0, "0", folders) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        with start(1, port, folders):
            reasons = [json.loads(line) for line in first.stdout]

    by_name = dict(zip((folder.name for folder in folders), reasons, strict=True))
    split = {name for name, reason in by_name.items() if reason is None}
    assert len(split) > 50
    assert {"llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"} <= split
    for name, reason in by_name.items():
        if name in WRONG:
            assert "split over 2 ranks, on a small random copy" in reason
        elif name not in split:
            assert reason.endswith(REASONS), (name, reason)
