"""Reading LoRA adapters: what fits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixd.worker.lora import LoraIdentity, LoraSourceInvalid, parse_lora_source
from prefixd.worker.model.errors import AdapterUnusable
from prefixd.worker.model.lora import load_adapter
from tests.support.adapters import write_adapter
from tests.support.models import eager_folder
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def network(model_folder: Path) -> Any:
    """The tiny model."""
    return eager_folder(model_folder)


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """An adapter that fits."""
    return write_adapter(tmp_path / "adapter", model_folder, seed=3)


def load(folder: Path, network: Any) -> Any:
    """Reads it under the name of its folder."""
    return load_adapter(LoraIdentity("x", str(folder)), network, dtype=torch.float32)


def test_adapter_that_fits_has_a_delta_per_layer(folder: Path, network: Any) -> None:
    """Three kinds of layers, two of each."""
    adapter = load(folder, network)
    assert len(adapter.deltas) == 6
    assert "model.layers.1.mlp.down_proj" in adapter.deltas


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("alpha_pattern", {"q_proj": 3}),
        ("lora_alpha", None),
    ],
)
def test_settings_that_change_the_sum_are_refused(
    folder: Path, network: Any, setting: str, value: object
) -> None:
    """Whatever would be computed wrong is refused, with its reason."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    with pytest.raises(AdapterUnusable) as caught:
        load(folder, network)
    assert caught.value.reason


FIRST = "base_model.model.model.layers.0.mlp.down_proj"
HEAD = "base_model.model.lm_head"
MISFITS: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "shape": ({f"{FIRST}.lora_A.weight": (4, 95)}, "which do not fit the model"),
    "layer": (
        {"base_model.model.no.lora_A.weight": (4, 8), "base_model.model.no.lora_B.weight": (8, 4)},
        "the model has no no",
    ),
    "half": ({"base_model.model.no.lora_A.weight": (4, 8)}, "one half only"),
    "name": ({"strange": (4, 8)}, "no half of a LoRA layer"),
    "head": (
        {f"{HEAD}.lora_A.weight": (4, 64), f"{HEAD}.lora_B.weight": (258, 4)},
        "no layer that can be adapted",
    ),
}


@pytest.mark.parametrize("misfit", sorted(MISFITS))
def test_adapter_of_another_model_is_refused(folder: Path, network: Any, misfit: str) -> None:
    """Wrong shapes, unknown layers, half a layer, strange names, the head."""
    changes, reason = MISFITS[misfit]
    path = folder / "adapter_model.safetensors"
    changed = {name: torch.zeros(shape) for name, shape in changes.items()}
    save_file(load_file(path) | changed, path)
    with pytest.raises(AdapterUnusable, match=reason):
        load(folder, network)


def test_missing_files_are_told(tmp_path: Path, network: Any) -> None:
    """An empty folder is no adapter."""
    with pytest.raises(AdapterUnusable, match="adapter_config"):
        load(tmp_path, network)


def test_sources_are_read() -> None:
    """A name, a version where there is one, and a folder that may hold any character."""
    assert parse_lora_source("a=/x/y") == LoraIdentity("a", "/x/y", "")
    assert parse_lora_source("a@7=/x@y=z") == LoraIdentity("a", "/x@y=z", "7")


@pytest.mark.parametrize("text", ["", "a", "=x", "a=", "@1=x", "n" * 257 + "=x"])
def test_bad_sources_are_refused(text: str) -> None:
    """No name, no folder, or too long."""
    with pytest.raises(LoraSourceInvalid):
        parse_lora_source(text)
