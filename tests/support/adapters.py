"""Random LoRA adapters in peft's format, and the model that one makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import eager_folder

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_adapter(
    folder: Path,
    model_folder: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    **settings: Any,
) -> Path:
    """Writes an adapter for every layer of a model; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in eager_folder(model_folder).named_parameters():
        layer_name = name.removesuffix(".weight")
        if not layer_name.endswith(tuple(targets)):
            continue
        output_width, input_width = parameter.shape
        key = f"base_model.model.{layer_name}"
        down = torch.randn((rank, input_width), generator=generator) * 0.2
        up = torch.randn((output_width, rank), generator=generator) * 0.2
        weights |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "use_rslora": False,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def merged_model(model_folder: Path, adapter_folder: Path) -> Any:
    """The model with an adapter's product added to its weights, with eager attention."""
    network = eager_folder(model_folder)
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    weights = load_file(adapter_folder / "adapter_model.safetensors")
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    with torch.no_grad():
        for key, down in weights.items():
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = weights[key.replace("lora_A", "lora_B")]
                network.get_submodule(name).weight += scale * up @ down
    return network
