"""Sizes a model's pool by the memory of its device."""

from dataclasses import dataclass, replace

import torch

from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.config import ConfigInvalid, ModelConfig
from prefixd.worker.model.kv_cache import block_byte_count
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.memory import (
    MEBIBYTE,
    PoolSize,
    PoolTooLarge,
    available_byte_count,
    check_fits,
)

CPU_POOL_BYTES = 768 * MEBIBYTE
"""Memory of a pool on the CPU: some 17,000 tokens of the small model."""
CPU_POOL_SHARE_MAX = 0.5
"""Share of the memory at hand that a pool takes on the CPU at most, where nobody sized it."""
CPU_BLOCK_COUNT_MAX_DEFAULT = 65_536
"""Most blocks of a pool on the CPU that nobody sized: tiny models would make absurd ones."""
GPU_BLOCK_COUNT_MAX_DEFAULT = 1_048_576
"""The same on a GPU."""


@dataclass(frozen=True, slots=True)
class SizedPool:
    """A pool that fits, and one line that tells people why it is as large as it is."""

    size: PoolSize
    line: str

    @property
    def block_count(self) -> int:
        """Blocks, block 0 included."""
        return self.size.block_count


def size_pool(
    model: LoadedModel,
    backend: AttentionBackend,
    config: ModelConfig,
    *,
    kv_dtype: torch.dtype,
    records_graphs: bool,
) -> SizedPool:
    """As many blocks as were asked for, or as the memory of the model's device has room for.

    Args:
        model: loaded, with its adapters.
        backend: of attention.
        config: what was asked for.
        kv_dtype: of K and V in the pool.
        records_graphs: whether passes of decode will be recorded.

    Raises:
        ConfigInvalid: the pool does not fit; the message names option and numbers.
    """
    per_block = block_byte_count(model.page_geometry, block_size=config.block_size, dtype=kv_dtype)
    try:
        if model.device.type == "cuda":
            sized = _size_on_gpu(
                model,
                backend,
                config,
                per_block=per_block,
                kv_dtype=kv_dtype,
                records_graphs=records_graphs,
            )
        else:
            sized = _size_on_cpu(config, per_block=per_block)
    except PoolTooLarge as error:
        raise ConfigInvalid(str(error)) from error
    name = str(kv_dtype).removeprefix("torch.")
    return replace(sized, line=f"{sized.line} in {name}")


def _size_on_cpu(config: ModelConfig, *, per_block: int) -> SizedPool:
    """Ranks of one model share the machine's memory."""
    available = available_byte_count()
    share = None if available is None else available // config.rank_count
    if config.block_count is not None:
        size = PoolSize(config.block_count, config.block_size, per_block)
        if share is not None:
            check_fits(size, byte_count_max=share, where="of memory available")
        return SizedPool(size, f"CPU: {size.describe()}")
    byte_count = CPU_POOL_BYTES // config.rank_count
    if share is not None:
        byte_count = min(byte_count, int(share * CPU_POOL_SHARE_MAX))
    count = max(2, min(byte_count // per_block, CPU_BLOCK_COUNT_MAX_DEFAULT))
    size = PoolSize(count, config.block_size, per_block)
    return SizedPool(size, f"CPU: {size.describe()}")


def _size_on_gpu(
    model: LoadedModel,
    backend: AttentionBackend,
    config: ModelConfig,
    *,
    per_block: int,
    kv_dtype: torch.dtype,
    records_graphs: bool,
) -> SizedPool:
    # Imported here: it needs all that runs a model.
    from prefixd.worker.model.memory_profile import measure_memory

    try:
        memory = measure_memory(
            model,
            backend,
            config.limits,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            records_graphs=records_graphs,
        )
    except torch.OutOfMemoryError as error:
        raise PoolTooLarge(
            f"--token-budget is {config.limits.token_budget}, but a pass of as many tokens does not"
            f" fit the memory of {model.device}: {error}"
        ) from error
    utilization = config.gpu_memory_utilization
    line = memory.describe(utilization)
    byte_count_max = memory.pool_byte_count_max(utilization)
    if config.block_count is not None:
        size = PoolSize(config.block_count, config.block_size, per_block)
        check_fits(
            size,
            byte_count_max=byte_count_max,
            where=f"left by --gpu-memory-utilization ({line})",
        )
        return SizedPool(size, f"{line}, {size.describe()}")
    count = min(byte_count_max // per_block, GPU_BLOCK_COUNT_MAX_DEFAULT)
    if count < 2:
        raise PoolTooLarge(
            f"--gpu-memory-utilization is {utilization:g}, which leaves no room for a pool of 2"
            f" blocks ({line})"
        )
    size = PoolSize(count, config.block_size, per_block)
    return SizedPool(size, f"{line}, {size.describe()}")
