"""Loads one rank's part of a model: the same steps, at the same time, on every rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs leave it out

from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import load_split
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model_setup import Setting, fitting_pool, make_runner
from prefixd.worker.parallel.group import join_group
from prefixd.worker.pool_sizing import SizedPool


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a model, which has no pool yet."""

    model: LoadedModel
    backend: AttentionBackend
    config: ModelConfig

    def fitting_pool(self) -> SizedPool:
        """The pool that this rank's memory has room for; it holds this rank's heads only.

        Raises:
            ConfigInvalid: there is no room for the blocks that were asked for.
        """
        return fitting_pool(self.model, self.backend, self.config)

    def runner(self, *, block_count: int, report: Callable[[str], None]) -> ModelRunner:
        """Makes the pool; ``report`` gets a line for what takes long.

        Raises:
            ConfigInvalid: it does not fit the memory.
        """
        return make_runner(
            self.model, self.backend, self.config, block_count=block_count, report=report
        )


def rank_device(device: torch.device, *, rank: int, rank_count: int) -> torch.device:
    """The device of one rank, where the model's is ``device``.

    Raises:
        ConfigInvalid: there are fewer GPUs than ranks, or ``device`` is one of several.
    """
    if device.type == "cpu":
        if torch.accelerator.device_count():
            # transformers splits a model over the accelerators where there are any.
            raise ConfigInvalid(
                "--tensor-parallel on the CPU of a machine with GPUs needs them hidden:"
                " CUDA_VISIBLE_DEVICES="
            )
        return device
    if str(device) != device.type:
        raise ConfigInvalid(
            f"--device {device} names one GPU, but --tensor-parallel takes the first {rank_count}"
        )
    gpu_count = torch.cuda.device_count()
    if rank_count > gpu_count:
        raise ConfigInvalid(
            f"--tensor-parallel is {rank_count}, but this machine has {gpu_count} usable GPUs"
        )
    return torch.device(device.type, rank)


def load_part(config: ModelConfig, setting: Setting, *, rank: int, store: TCPStore) -> Part:
    """Joins the other ranks, and loads what is this rank's.

    Raises:
        ConfigInvalid: the device is not to be had.
        ModelUnavailable: the folder does not hold a readable, complete model.
        ModelRefused: by the guard.
    """
    rank_count = config.rank_count
    device = rank_device(setting.device, rank=rank, rank_count=rank_count)
    join_group(store, rank=rank, rank_count=rank_count, device=device)
    model = load_split(
        setting.folder,
        name=setting.name,
        backend=setting.backend,
        device=device,
        dtype=setting.dtype,
        rank_count=rank_count,
    )
    return Part(model, setting.backend, config)
