"""Folders of models that are damaged or contradict themselves: each is told in its own words."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.loader import load_folder
from tests.support.models import CPU
from tests.support.tiny_model import write_tiny_model

WEIGHTS = "model.safetensors"
VALUES = "model.layers.1.self_attn.v_proj.weight"


def settings(**changes: Any) -> Callable[[Path], None]:
    """Changes settings of the configuration."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def half_the_weights(folder: Path) -> None:
    """Cuts the file, as a full disk does."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def a_missing_shard(folder: Path) -> None:
    """Splits the weights in two files, of which the second is not there."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:5]}, folder / shards[0], {"format": "pt"})
    index = {name: shards[place >= 5] for place, name in enumerate(names)}
    content = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def of_nothing(kind: float, name: str) -> Callable[[Path], None]:
    """One tensor holds no numbers any more."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        damaged = torch.full_like(weights[name], kind)
        save_file(weights | {name: damaged}, folder / WEIGHTS, {"format": "pt"})

    return damage


def damaged_tokenizer(folder: Path) -> None:
    """No JSON."""
    (folder / "tokenizer.json").write_text("{")


CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
UNAVAILABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "half": (half_the_weights, "incomplete metadata, file not fully covered"),
    "shard": (a_missing_shard, "model-00002-of-00002.safetensors"),
    "heads": (settings(num_attention_heads=3), "not a multiple of the number of attention heads"),
    "type": (settings(num_attention_heads="four"), "'num_attention_heads' expected int, got str"),
    "width": (
        settings(vocab_size=300),
        r"lm_head.weight has shape \(258, 64\), but its configuration says \(300, 64\)",
    ),
    "nan": (of_nothing(torch.nan, VALUES), f"{VALUES} holds NaN"),
    "tokenizer": (damaged_tokenizer, ": Expecting property name"),
    "code": (settings(model_type="unheard", auto_map=CODE), "contains custom code"),
}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "infinity": (of_nothing(torch.inf, VALUES), "a forward of 4 tokens makes NaN: its weights"),
    "context": (settings(max_position_embeddings=31), "its context of 31 tokens"),
    "layers": (settings(num_hidden_layers=0), "it has no layers"),
    "packages": (settings(quantization_config={"quant_method": "gptq", "bits": 4}), "optimum"),
}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is whole."""
    return write_tiny_model(tmp_path_factory.mktemp("whole"))


def load(good: Path, folder: Path, damage: Callable[[Path], None]) -> None:
    """Loads a damaged copy."""
    shutil.copytree(good, folder)
    damage(folder)
    backend = create_backend("torch")
    load_folder(folder, name="damaged", backend=backend, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_what_cannot_be_read_is_unavailable(
    tiny_folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folder, and what is wrong there; nobody is asked on the terminal."""
    monkeypatch.setattr(sys, "stdin", None)
    damage, reason = UNAVAILABLE[name]
    with pytest.raises(ModelUnavailable, match=f"(?s){tmp_path / name}.*{reason}"):
        load(tiny_folder, tmp_path / name, damage)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_answer_is_refused(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    """Rather than answered with noise."""
    damage, reason = REFUSED[name]
    with pytest.raises(ModelRefused, match=reason):
        load(tiny_folder, tmp_path / name, damage)
