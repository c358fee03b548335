"""Brings the model of a configuration into memory, with a pool that fits."""

import time
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
from prefixd.worker.attention.seam import AttentionBackend, RecordableBackend
from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.model.fetch import PACKAGED_MODELS, model_folder
from prefixd.worker.model.graphs import CudaGraphRecorder, GraphRecorder
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.pool_sizing import SizedPool, size_pool

KV_DTYPES_8_BIT = {"int8": torch.int8, "fp8": FP8_DTYPE}
"""The 8-bit formats of KV by their names among the options."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the options of a model come down to on this machine."""

    folder: Path
    name: str
    device: torch.device
    dtype: torch.dtype
    backend: AttentionBackend


def load_runner(config: ModelConfig, *, report: Callable[[str], None]) -> ModelRunner:
    """Loads the model, makes its pool and gets ready to run.

    Args:
        config: the options.
        report: gets a line for what takes long, and one about the memory.

    Raises:
        ConfigInvalid: an option is out of range, or the pool does not fit.
        ModelRefused: by the guard.
        ModelUnavailable: the model's files are not to be had.
        AdapterUnusable: a LoRA adapter cannot be read or does not fit.
    """
    setting = settle(config, report=report)
    # Imported here: transformers takes seconds, and a bad option should fail at once.
    from prefixd.worker.model.loader import load_folder, with_adapters

    try:
        model = load_folder(
            setting.folder,
            name=setting.name,
            backend=setting.backend,
            device=setting.device,
            dtype=setting.dtype,
        )
        model = with_adapters(model, config.loras)
    except torch.OutOfMemoryError as error:
        raise ConfigInvalid(
            f"the weights of model {setting.name!r} do not fit the memory of {setting.device}"
            f" (--dtype {config.dtype}, --tensor-parallel {config.rank_count}): {error}"
        ) from error
    pool = fitting_pool(model, setting.backend, config)
    report(pool.line)
    return make_runner(model, setting.backend, config, block_count=pool.block_count, report=report)


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
    if backend_name == "triton" and device.type == "cpu" and torch.cuda.is_available():
        # Without a GPU the backend itself says so, or runs in triton's interpreter.
        raise ConfigInvalid("--attention-backend triton computes on GPUs, but --device is cpu")
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


def fitting_pool(model: LoadedModel, backend: AttentionBackend, config: ModelConfig) -> SizedPool:
    """The pool that was asked for, or the largest one that the device has room for.

    Raises:
        ConfigInvalid: it does not fit.
    """
    return size_pool(
        model,
        backend,
        config,
        kv_dtype=_kv_dtype(config.kv_dtype, model),
        records_graphs=_records_graphs(model, backend, config),
    )


def make_runner(
    model: LoadedModel,
    backend: AttentionBackend,
    config: ModelConfig,
    *,
    block_count: int,
    report: Callable[[str], None],
) -> ModelRunner:
    """Makes the pool of a model; on a GPU compiles what runs, and records passes of decode.

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
    runner = ModelRunner(model, kv, backend)
    if model.device.type != "cuda":
        return runner
    return _warm_runner(runner, backend, config, report)


def _warm_runner(
    runner: ModelRunner,
    backend: AttentionBackend,
    config: ModelConfig,
    report: Callable[[str], None],
) -> ModelRunner:
    """The same with all kernels compiled, and with recordings where they are to be had."""
    from prefixd.worker.model.memory_profile import warm_up

    device = runner.model.device
    start_s = time.perf_counter()
    warm_up(runner)
    torch.cuda.synchronize(device)
    report(f"kernels compiled in {time.perf_counter() - start_s:.1f} s")
    if not _records_graphs(runner.model, backend, config):
        if config.records_graphs:
            reason = "split" if config.rank_count > 1 else "on this attention backend"
            report(f"no CUDA graphs, so decode steps start kernel by kernel: the model is {reason}")
        return runner
    return recording_runner(runner, backend, CudaGraphRecorder(device), config.limits, report)


def recording_runner(
    runner: ModelRunner,
    backend: AttentionBackend,
    recorder: GraphRecorder,
    limits: SchedulerLimits,
    report: Callable[[str], None],
) -> ModelRunner:
    """The same with its passes of decode recorded, where its model allows it."""
    assert isinstance(backend, RecordableBackend), "a backend whose passes can be recorded"
    model, kv = runner.model, runner.kv
    slot_count_max = (kv.block_count - 1) * kv.block_size
    graphs = DecodeGraphs(
        model,
        kv,
        backend,
        recorder,
        row_count_max=limits.running_sequence_count_max,
        context_token_count_max=min(model.context_token_count_max, slot_count_max),
    )
    start_s = time.perf_counter()
    try:
        graphs.record_passes()
    except RuntimeError as error:
        # Some models do what no graph can hold; they run as well, but slower.
        report(f"no CUDA graphs, so decode steps start kernel by kernel: {error}")
        return runner
    try:
        graphs.record_draws()
    except RuntimeError as error:
        report(f"no CUDA graphs of draws, which start kernel by kernel: {error}")
    seconds = time.perf_counter() - start_s
    report(f"decode steps of {len(graphs.sizes)} sizes recorded as CUDA graphs in {seconds:.1f} s")
    return ModelRunner(model, kv, backend, graphs)


def _records_graphs(model: LoadedModel, backend: AttentionBackend, config: ModelConfig) -> bool:
    """Ranks of a split model would have to record in step; they run kernel by kernel."""
    return (
        model.device.type == "cuda"
        and config.records_graphs
        and config.rank_count == 1
        and isinstance(backend, RecordableBackend)
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid(f"--device is {name!r}, but this machine has no usable GPU")
    index = int(name.partition(":")[2] or 0)
    if device.type == "cuda" and index >= torch.cuda.device_count():
        raise ConfigInvalid(
            f"--device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs, from"
            " cuda:0 on"
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
