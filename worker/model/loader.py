"""Loads a Hugging Face decoder with paged attention, after the guard has passed it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.kv_groups import KvGroup, group_layers
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.model.attention_hook import ATTENTION_NAME, attach_context, register_attention
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.guard import check_config, check_layers
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.lora import LoraSwitch, load_adapter
from prefixd.worker.model.numeric_probe import check_numbers
from prefixd.worker.model.probe import ProbedLayer, probe_layers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")

_UNREADABLE = (OSError, SafetensorError, StrictDataclassError, ValueError)
"""What transformers raises at files that it cannot read, or that contradict themselves."""
_OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is fetched, no code of a folder runs, and nobody is asked on the terminal."""
_WEIGHT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Those in which weights are looked at: torch finds no extremes in narrower ones."""
_AUTO_MODEL: Any = AutoModelForCausalLM  # its own annotations leave out what is used here


def load_folder(
    folder: Path, *, name: str, backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """Loads weights and tokenizer from a folder as ``save_pretrained`` writes it; never online.

    Raises:
        ModelUnavailable: the folder does not hold a readable, complete model.
        ModelRefused: by the guard; before the weights are read where the configuration tells.
    """
    network = load_network(folder, name=name, dtype=dtype)
    check_weights(network, folder, name=name)
    network = network.to(device)
    model = _guarded(network, name=name, backend=backend, folder=folder)
    check_numbers(network.config, backend, device=device, model_name=name)
    return model


def load_split(
    folder: Path,
    *,
    name: str,
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    rank_count: int,
) -> LoadedModel:
    """Loads this rank's part of a model that is split by heads, as transformers' plan says.

    The process is in a group of ``rank_count`` ranks; all of them load at the same time. The split
    small copy is compared with the whole one, so that a plan that splits wrongly shows.

    Raises:
        ModelUnavailable: the folder does not hold a readable, complete model.
        ModelRefused: by the guard.
    """
    config = load_config(folder, name=name)
    register_attention()
    split = DistributedConfig(tp_size=rank_count, tp_plan="auto")

    def split_twin(network: Any) -> Any:
        with _refusing(name):
            twin = type(network).from_pretrained(
                None,
                config=network.config,
                state_dict=network.state_dict(),
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                distributed_config=split,
            )
        return twin.eval()

    try:
        check_numbers(config, backend, device=device, model_name=name, paged_twin=split_twin)
    except ModelRefused as error:
        reason = f"split over {rank_count} ranks, {error.reason}"
        raise ModelRefused(model_name=name, reason=reason) from error
    network = load_network(folder, name=name, dtype=dtype, distributed_config=split)
    model = _guarded(network, name=name, backend=backend, folder=folder)
    return replace(model, rank_count=rank_count)


def load_config(folder: Path, *, name: str) -> Any:
    """Reads the configuration of a model.

    Raises:
        ModelUnavailable: the folder does not hold a readable one.
        ModelRefused: by the guard.
    """
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(model_name=name, reason=f"{folder} holds no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, **_OFFLINE)
    except _UNREADABLE as error:
        raise ModelUnavailable(model_name=name, reason=f"{folder}: {error}") from error
    check_config(config, model_name=name)
    return config


def load_network(folder: Path, *, name: str, dtype: torch.dtype, **options: Any) -> Any:
    """Loads a transformers model with our attention, with all its weights.

    Args:
        folder: as ``save_pretrained`` writes it.
        name: for errors.
        dtype: of the weights.
        options: for ``from_pretrained``; without any, the weights are on the CPU.

    Raises:
        ModelUnavailable: the folder does not hold a readable, complete model.
        ModelRefused: by the guard, which has seen its configuration only.
    """
    load_config(folder, name=name)
    register_attention()
    try:
        with _refusing(name):
            network, report = _AUTO_MODEL.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
                # Told below, with their shapes.
                ignore_mismatched_sizes=True,
                **_OFFLINE,
                **options,
            )
    except _UNREADABLE as error:
        raise ModelUnavailable(model_name=name, reason=f"{folder}: {error}") from error
    # In place of either transformers would go on with random weights.
    if report["mismatched_keys"]:
        key, found, expected = sorted(report["mismatched_keys"])[0]
        shapes = f"{tuple(found)}, but its configuration says {tuple(expected)}"
        raise ModelUnavailable(model_name=name, reason=f"{folder}: {key} has shape {shapes}")
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelUnavailable(model_name=name, reason=f"{folder} lacks weights: {missing}")
    return network


def check_weights(network: Any, folder: Path, *, name: str) -> None:
    """Looks for NaN in all weights, which costs a fraction of the time that reading them took.

    Raises:
        ModelUnavailable: there is one.
    """
    for key, weight in network.named_parameters():
        if weight.dtype not in _WEIGHT_DTYPES or not weight.numel():
            continue
        # NaN is the least and the greatest of whatever holds it.
        if torch.aminmax(weight.detach()).min.isnan():
            raise ModelUnavailable(model_name=name, reason=f"{folder}: {key} holds NaN")


def with_adapters(model: LoadedModel, identities: Sequence[LoraIdentity]) -> LoadedModel:
    """Attaches LoRA adapters to a model that has none.

    Raises:
        AdapterUnusable: one cannot be read or does not fit.
    """
    assert not model.lora.identities, "adapters are attached once"
    adapters = [load_adapter(one, model.network, dtype=model.dtype) for one in identities]
    return replace(model, lora=LoraSwitch(model.network, adapters))


def _load_tokenizer(folder: Path, *, model_name: str) -> Any | None:
    """The folder's tokenizer; None where it has none, and serves token ids only."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, **_OFFLINE)
    except _UNREADABLE as error:
        reason = f"the tokenizer of {folder}: {error}"
        raise ModelUnavailable(model_name=model_name, reason=reason) from error


@contextmanager
def _refusing(model_name: str) -> Iterator[None]:
    """Turns what transformers raises where it cannot build a model with our attention."""
    try:
        yield
    except KeyError as error:
        # Older model code picks its attention class by name.
        reason = f"its attention cannot be replaced: {error} is unknown to it"
        raise ModelRefused(model_name=model_name, reason=reason) from error
    except (ImportError, ValueError) as error:
        raise ModelRefused(model_name=model_name, reason=str(error)) from error


def _guarded(network: Any, *, name: str, backend: AttentionBackend, folder: Path) -> LoadedModel:
    tokenizer = _load_tokenizer(folder, model_name=name)
    network.eval().requires_grad_(False)
    config = network.config.get_text_config()
    context = attach_context(network)
    layers = probe_layers(network, context, model_name=name)
    check_layers(layers, config, backend, model_name=name)
    geometry = tuple(layer.geometry for layer in layers)
    return LoadedModel(
        name=name,
        network=network,
        context=context,
        layer_indices={layer.module: index for index, layer in enumerate(layers)},
        geometry=geometry,
        groups=_groups_of(layers, config.max_position_embeddings),
        dtype=network.dtype,
        device=network.device,
        vocabulary_size=config.vocab_size,
        context_token_count_max=config.max_position_embeddings,
        end_token_ids=_end_token_ids(network, tokenizer),
        tokenizer=tokenizer,
        lora=LoraSwitch(network, ()),
        folder=folder,
    )


def _groups_of(layers: Sequence[ProbedLayer], context_token_count_max: int) -> tuple[KvGroup, ...]:
    """KV groups of a model; a window as long as the context is none."""
    windows = [
        window if window is not None and window < context_token_count_max else None
        for window in (layer.traits.window_token_count for layer in layers)
    ]
    return group_layers(windows, [layer.geometry for layer in layers])


def _end_token_ids(network: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every token that the configuration, the generation settings or the tokenizer call an end."""
    sources = [network.config.get_text_config(), network.generation_config, tokenizer]
    end_token_ids: set[int] = set()
    for source in sources:
        stated = getattr(source, "eos_token_id", None)
        if isinstance(stated, int):
            end_token_ids.add(stated)
        elif stated is not None:
            end_token_ids.update(stated)
    return frozenset(end_token_ids)
