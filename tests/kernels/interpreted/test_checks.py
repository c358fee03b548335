"""The checks that GPU machines run, in the interpreter: they find what is wrong, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu_parts import correctness
from bench.gpu_parts.correctness import check_layer
from bench.gpu_parts.sizes import CheckedLayer, full_sizes, tiny_sizes
from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.kernels.variants import LayerKind

CPU = torch.device("cpu")
SIZES = tiny_sizes().checks
FULL = full_sizes().checks


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, FP8_DTYPE])
def test_right_kernels_pass(kv_dtype: torch.dtype) -> None:
    """Also in the dtypes that the interpreter has to be repaired for."""
    layer = CheckedLayer(LayerKind(16, 16, torch.bfloat16, kv_dtype), 4, 1)
    checks = check_layer(layer, sizes=SIZES, device=CPU)
    assert [True] * 6 == [check.passed for check in checks]


def failing(monkeypatch: pytest.MonkeyPatch, launcher: str, argument: str) -> list[str]:
    """Names of the kernels that fail once one number of the launches of some is wrong."""
    original = getattr(correctness, launcher)

    def launches(*arguments: object, **named: object) -> list[Launch]:
        return [
            replace(launch, arguments={**launch.arguments, argument: changed(launch, argument)})
            if argument in launch.arguments
            else launch
            for launch in original(*arguments, **named)
        ]

    monkeypatch.setattr(correctness, launcher, launches)
    checks = check_layer(SIZES.layers[0], sizes=SIZES, device=CPU)
    assert not any(check.failure for check in checks)
    return [check.kernel for check in checks if not check.passed]


def changed(launch: Launch, argument: str) -> object:
    """A number that is slightly off."""
    value = launch.arguments[argument]
    return value * 1.001 if isinstance(value, float) else value - 1


def test_wrong_attention_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are a thousandth too large are found in every kind of item."""
    attention = ["attend narrow", "attend wide", "attend whole", "reduce"]
    assert attention == failing(monkeypatch, "attention_launches", "scaling")


def test_a_wrong_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last slot of block 0 that is written, and a stride that is off."""
    assert ["store"] == failing(monkeypatch, "store_launches", "first_slot")


def test_a_wrong_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin one unit early."""
    assert ["copy"] == failing(monkeypatch, "copy_launches", "units_per_block")


def test_a_kernel_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines say why; the other kinds are checked."""

    def launches(*_: object, **__: object) -> list[Launch]:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(correctness, "attention_launches", launches)
    checks = check_layer(SIZES.layers[0], sizes=SIZES, device=CPU)
    assert {"RuntimeError: out of registers"} == {check.failure for check in checks}


def test_another_kernel_than_the_reports_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked is what the kernels report compiled, down to its tiles."""
    original = correctness.store_launches

    def launches(*arguments: object, **named: object) -> list[Launch]:
        return [replace(launch, warp_count=8) for launch in original(*arguments, **named)]

    monkeypatch.setattr(correctness, "store_launches", launches)
    checks = check_layer(SIZES.layers[0], sizes=SIZES, device=CPU)
    assert ["other kernel"] == [check.failure for check in checks if not check.passed]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layer", FULL.layers, ids=lambda layer: layer.name)
def test_every_layer_passes(layer: CheckedLayer) -> None:
    """The bounds that a GPU is held to are bounds that right kernels keep, in its own tiles."""
    smaller = replace(FULL, chunk=(20, 300), long_chunk=(40, 200), long_query_row_count=40)
    if layer.is_reported:
        layer = replace(layer, query_head_count=4, kv_head_count=1)
    checks = check_layer(layer, sizes=smaller, device=CPU)
    assert [True] * 6 == [check.passed for check in checks]
