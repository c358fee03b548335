"""Brings the model of a configuration into memory, with a pool that fits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from prefixd.kernels.layer_kv import FP8_DTYPE, fp8_refusal
from prefixd.worker.attention.registry import (
    BackendUnavailable,
    backend_name_for,
    create_backend,
)
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.model.fetch import PACKAGED_MODELS, model_folder
from prefixd.worker.model.kv_cache import PagedKv, block_byte_count
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner

CPU_POOL_BYTES = 768 * 1024 * 1024
"""Memory of a pool on the CPU: some 17,000 tokens of the small model."""
GPU_POOL_SHARE = 0.6
"""Share of the free GPU memory that the pool takes once the model is loaded."""
KV_DTYPES_8_BIT = {"int8": torch.int8, "fp8": FP8_DTYPE}
"""The 8-bit formats of KV by their names among the options."""
BLOCK_COUNT_MAX_DEFAULT = 65_536
"""Most blocks of a pool that nobody sized: tiny models would make absurd ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the options of a model come down to on this machine."""

    folder: Path
    name: str
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend


def load_runner(config: ModelConfig, *, report: Callable[[str], None]) -> ModelRunner:
    """Loads the model and makes its pool; ``report`` gets a line before a download.

    Raises:
        ConfigInvalid: an option is out of range.
        ModelRefused: by the guard.
        ModelUnavailable: the model's files are not to be had.
        AdapterUnusable: a LoRA adapter cannot be read or does not fit.
    """
    setting = settle(config, report=report)
    # Imported here: transformers takes seconds, and a bad option should fail at once.
    from prefixd.worker.model.loader import load_folder, with_adapters

    model = load_folder(
        setting.folder,
        name=setting.name,
        backend=setting.backend,
        device=setting.device,
        dtype=setting.dtype,
    )
    model = with_adapters(model, config.loras)
    block_count = config.block_count or fitting_block_count(model, config)
    return make_runner(model, setting.backend, config, block_count=block_count)


def settle(config: ModelConfig, *, report: Callable[[str], None]) -> Setting:
    """Checks the options and finds the model; ``report`` gets a line before a download.

    Raises:
        ConfigInvalid: an option is out of range.
        ModelUnavailable: the model's files are not to be had.
    """
    config.check()
    device = _device(config.device)
    _check_kv_dtype(config.kv_dtype, device)
    backend_name = backend_name_for(config.attention_backend, device_type=device.type)
    try:
        backend = create_backend(backend_name)
    except BackendUnavailable as error:
        raise ConfigInvalid(str(error)) from error
    if device.type == "cpu":
        torch.set_num_threads(config.thread_count)
    folder = model_folder(config.model, report=report)
    # Imported here: transformers takes seconds, and a bad option should fail at once.
    from transformers.utils import logging as transformers_logging

    # Standard error carries JSON lines only.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # theirs
    name = config.model if config.model in PACKAGED_MODELS else folder.resolve().name
    return Setting(folder, name, device, _dtype(config.dtype, device), backend)


def make_runner(
    model: LoadedModel, backend: AttentionBackend, config: ModelConfig, *, block_count: int
) -> ModelRunner:
    """Makes the pool of a model.

    Raises:
        ConfigInvalid: the pool does not fit the memory.
    """
    try:
        kv = PagedKv(
            model.page_geometry,
            block_count=block_count,
            block_size=config.block_size,
            dtype=_kv_dtype(config.kv_dtype, model),
            device=model.device,
        )
    except RuntimeError as error:  # torch has no kind of its own for this on the CPU
        raise ConfigInvalid(
            f"a pool of {block_count} blocks of {config.block_size} does not fit the memory of"
            f" {model.device}"
        ) from error
    return ModelRunner(model, kv, backend)


def fitting_block_count(model: LoadedModel, config: ModelConfig) -> int:
    """Blocks that the memory of the model's device has room for; ranks on a CPU share its."""
    byte_count = CPU_POOL_BYTES // config.rank_count
    if model.device.type == "cuda":
        free_byte_count, _ = torch.cuda.mem_get_info(model.device)
        byte_count = int(GPU_POOL_SHARE * free_byte_count)
    kv_dtype = _kv_dtype(config.kv_dtype, model)
    per_block = block_byte_count(model.page_geometry, block_size=config.block_size, dtype=kv_dtype)
    return max(2, min(byte_count // per_block, BLOCK_COUNT_MAX_DEFAULT))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid(f"device {name!r}: this machine has no usable GPU")
    index = int(name.partition(":")[2] or 0)
    if device.type == "cuda" and index >= torch.cuda.device_count():
        raise ConfigInvalid(
            f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, from cuda:0 on"
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def _check_kv_dtype(name: str, device: torch.device) -> None:
    if name == "fp8" and device.type == "cuda":
        refusal = fp8_refusal(torch.cuda.get_device_capability(device))
        if refusal is not None:
            raise ConfigInvalid(f"--kv-dtype fp8 on {device}: {refusal}")


def _kv_dtype(name: str, model: LoadedModel) -> torch.dtype:
    return model.dtype if name == "auto" else KV_DTYPES_8_BIT[name]
