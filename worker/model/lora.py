"""LoRA adapters in peft's format, applied beside an unmodified model.

A linear layer with weight W gives W x; with an adapter it gives W x + s B (A x), where A and B are
narrow and s is lora_alpha / r, or lora_alpha / sqrt(r) where the adapter says so (use_rslora).
Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021).

The sum is computed behind each layer for the rows of the sequences that want it, so that sequences
with different adapters, or none, share a pass.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from prefixd.worker.lora import LoraIdentity
from prefixd.worker.model.errors import AdapterUnusable

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."
DOWN_SUFFIX = ".lora_A.weight"
UP_SUFFIX = ".lora_B.weight"
UNSUPPORTED_SETTINGS = (
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
"""Settings that change what an adapter computes; it is refused where one is set."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What an adapter adds to one linear layer.

    Attributes:
        down: A, (rank, inputs).
        up: s B, (outputs, rank).
    """

    down: Tensor
    up: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """s B A x: (rows, inputs) to (rows, outputs)."""
        return functional.linear(functional.linear(inputs, self.down), self.up)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that fits the model; ``deltas`` by the name of their layer."""

    identity: LoraIdentity
    deltas: Mapping[str, LoraDelta]


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows of a pass that go through one adapter.

    Attributes:
        name: of the adapter.
        rows: int64, padded with repetitions to a count that the attention backend likes.
        row_count: rows without padding.
    """

    name: str
    rows: Tensor
    row_count: int


class LoraSwitch:
    """The adapters of one model, and which rows of the running pass go through which.

    Invariant: rows are set during a forward and at no other time.
    """

    def __init__(self, network: nn.Module, adapters: Sequence[LoraAdapter]) -> None:
        """Puts itself behind every layer that an adapter changes."""
        self._identities = tuple(adapter.identity for adapter in adapters)
        self._rows: tuple[LoraRows, ...] = ()
        for layer_name in sorted({name for adapter in adapters for name in adapter.deltas}):
            deltas = {
                adapter.identity.name: adapter.deltas[layer_name]
                for adapter in adapters
                if layer_name in adapter.deltas
            }
            network.get_submodule(layer_name).register_forward_hook(partial(self._add, deltas))

    @property
    def identities(self) -> tuple[LoraIdentity, ...]:
        """Those that sequences can ask for."""
        return self._identities

    @contextmanager
    def applied(self, rows: tuple[LoraRows, ...]) -> Iterator[None]:
        """Sets the rows for one forward."""
        assert not self._rows, "a forward of this model is already running"
        self._rows = rows
        try:
            yield
        finally:
            self._rows = ()

    def _add(
        self,
        deltas: Mapping[str, LoraDelta],
        _layer: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        # (1, rows, width): the layer has just made its output, so it may be changed in place.
        for lora in self._rows:
            delta = deltas.get(lora.name)
            if delta is not None:
                added = delta(inputs[0][0, lora.rows])[: lora.row_count]
                output[0, lora.rows[: lora.row_count]] += added
        return output


def load_adapter(identity: LoraIdentity, network: nn.Module, *, dtype: torch.dtype) -> LoraAdapter:
    """Reads an adapter from its folder and fits it to the model, on the model's device.

    Raises:
        AdapterUnusable: it cannot be read, asks for what is not supported, or does not fit.
    """
    folder = Path(identity.path)
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterUnusable(name=identity.name, reason=str(error)) from error
    _check_config(config, identity.name)
    layer_names = {_layer_name(key, identity.name) for key in weights}
    deltas = {}
    for layer_name in sorted(layer_names):
        down = weights.get(f"{KEY_PREFIX}{layer_name}{DOWN_SUFFIX}")
        up = weights.get(f"{KEY_PREFIX}{layer_name}{UP_SUFFIX}")
        if down is None or up is None:
            raise AdapterUnusable(name=identity.name, reason=f"{layer_name} has one half only")
        layer = _layer(network, layer_name, identity.name)
        _check_shapes(layer, down, up, layer_name=layer_name, name=identity.name)
        device = next(layer.parameters()).device
        scaled = up.float() * _scaling(config, rank=down.shape[0])
        deltas[layer_name] = LoraDelta(down.to(device, dtype), scaled.to(device, dtype))
    return LoraAdapter(identity, deltas)


def _check_config(config: Mapping[str, Any], name: str) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterUnusable(name=name, reason=f"its type is {config.get('peft_type')}, not LORA")
    if config.get("bias", "none") != "none":
        raise AdapterUnusable(name=name, reason="it changes biases")
    for setting in UNSUPPORTED_SETTINGS:
        if config.get(setting):
            raise AdapterUnusable(name=name, reason=f"{setting} is not supported")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise AdapterUnusable(name=name, reason=f"{CONFIG_FILE} has no lora_alpha")


def _scaling(config: Mapping[str, Any], *, rank: int) -> float:
    alpha: float = config["lora_alpha"]
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _layer_name(key: str, name: str) -> str:
    for suffix in (DOWN_SUFFIX, UP_SUFFIX):
        if key.startswith(KEY_PREFIX) and key.endswith(suffix):
            return key.removeprefix(KEY_PREFIX).removesuffix(suffix)
    raise AdapterUnusable(name=name, reason=f"{key} is no half of a LoRA layer")


def _layer(network: nn.Module, layer_name: str, name: str) -> nn.Linear | Conv1D:
    try:
        layer = network.get_submodule(layer_name)
    except AttributeError as error:
        raise AdapterUnusable(name=name, reason=f"the model has no {layer_name}") from error
    # Only layers that see every row of a pass: the head sees those that want logits, an expert
    # those that were sent to it.
    is_partial = layer_name == "lm_head" or "expert" in layer_name
    if is_partial or not isinstance(layer, nn.Linear | Conv1D):
        raise AdapterUnusable(name=name, reason=f"{layer_name} is no layer that can be adapted")
    return layer


def _check_shapes(
    layer: nn.Linear | Conv1D, down: Tensor, up: Tensor, *, layer_name: str, name: str
) -> None:
    weight = layer.weight
    output_width, input_width = weight.shape if isinstance(layer, nn.Linear) else weight.T.shape
    expected = ((down.shape[0], input_width), (output_width, down.shape[0]))
    if (tuple(down.shape), tuple(up.shape)) != expected:
        reason = f"{layer_name} has shapes {tuple(down.shape)} and {tuple(up.shape)}"
        raise AdapterUnusable(name=name, reason=f"{reason}, which do not fit the model")
