from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefixd.kernels.compilation import TARGETS, Compilation, Resources
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.kernels.report import Line, ResourceCache, default_cache_folder, report_target
from prefixd.kernels.variants import LayerKind, default_kinds, small_kinds, variants_of


def run_report(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the report as its user does; never in the interpreter, which compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "prefixd.kernels.report", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
def test_the_small_report_has_no_spills(repository_folder: Path, tmp_path: Path) -> None:
    """int8 kernels of the narrowest usual head compile for every target, unspilled."""
    path = tmp_path / "report.json"
    run = run_report("--kinds", "small", "--json", str(path), folder=repository_folder)
    assert 0 == run.returncode, run.stdout + run.stderr
    lines = json.loads(path.read_text())
    (kind,) = small_kinds()
    expected = {(target, variant.name) for target in TARGETS for variant in variants_of(kind)}
    assert expected == {(line["target"], line["variant"]) for line in lines}
    assert all(line["resources"]["register_count"] > 0 for line in lines)
    assert all(line["resources"]["spill_count"] == 0 for line in lines)


def test_fp8_is_refused_where_it_does_not_exist(tmp_path: Path) -> None:
    """The line says why, and it is no failure."""
    kind = LayerKind(128, 128, torch.bfloat16, FP8_DTYPE)
    lines = report_target(TARGETS["sm_80"], [kind], tmp_path)
    assert [variant.name for variant in variants_of(kind)] == [line.variant for line in lines]
    assert {"e4m3 conversions need compute capability 8.9 or newer"} == {
        line.refusal for line in lines
    }
    assert not any(line.failure or line.resources for line in lines)


@pytest.mark.slow
def test_fp8_indeed_does_not_compile_where_it_is_refused() -> None:
    """The refusal is no more careful than it has to be."""
    kind = LayerKind(64, 64, torch.bfloat16, FP8_DTYPE)
    target = replace(TARGETS["sm_80"], fp8_refusal=None)
    store = next(v for v in variants_of(kind) if v.name.startswith("store"))
    with pytest.raises(Exception, match="fp8e4nv"):
        Compilation(store.launch, target).resources()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_report_has_no_spills(repository_folder: Path) -> None:
    """Every default variant compiles for every target, unspilled."""
    run = run_report(folder=repository_folder)
    assert 0 == run.returncode, run.stdout + run.stderr


def test_names_tell_variants_apart() -> None:
    """A line of the report says which kernel it is about."""
    names = [variant.name for kind in default_kinds() for variant in variants_of(kind)]
    assert len(set(names)) == len(names)


def test_every_format_and_width_is_covered() -> None:
    """The default kinds cover all dtypes, 8-bit formats, head widths and options."""
    kinds = default_kinds()
    assert {64, 80, 96, 128, 192, 256} == {kind.key_width for kind in kinds}
    dtypes = {kind.dtype for kind in kinds} | {kind.kv_dtype for kind in kinds}
    eight_bit = {torch.int8, torch.float8_e4m3fn}
    assert {torch.float32, torch.float16, torch.bfloat16} | eight_bit == dtypes
    assert any(kind.has_all_options for kind in kinds)
    assert any(kind.key_width != kind.value_width for kind in kinds)


def test_failures_and_refusals_stand_in_the_line() -> None:
    """A reader sees why a variant is missing or bad."""
    bad = Line("sm_90", "attend", Resources(255, 4096, 12), failure="spills")
    assert "12  spills" in bad.text()
    assert "refused: too old" in Line("sm_80", "attend", refusal="too old").text()


class CountingCompilation:
    """Stands for a compilation that takes long."""

    def __init__(self) -> None:
        self.count = 0

    def key(self) -> str:
        """One key for all."""
        return "key"

    def resources(self) -> Resources:
        """Counts how often it was asked."""
        self.count += 1
        return Resources(1, 2, 0)


def test_what_is_known_is_not_compiled_again(tmp_path: Path) -> None:
    """A second cache on the same folder reads what the first one wrote."""
    compilation = CountingCompilation()
    for _ in range(2):
        cache = ResourceCache(tmp_path / "cache")
        assert Resources(1, 2, 0) == cache.measured(compilation)  # type: ignore[arg-type]
    assert 1 == compilation.count


def test_the_cache_folder_can_be_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable that moves the model cache moves this one too."""
    monkeypatch.setenv("PREFIXD_CACHE", str(tmp_path))
    assert tmp_path / "kernels" == default_cache_folder()
