"""Stores and copies on a paged pool: as plain torch here, by kernels where the pool is on a GPU."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv, as_movable, quantize_rows


class PoolWriter(Protocol):
    """One way to write a pool whose blocks have ``block_size`` slots."""

    def store(
        self, layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
    ) -> None:
        """Writes ``keys[i]`` and ``values[i]`` to slot ``slots[i]``, quantized where the pool is.

        Args:
            layer: the pool.
            keys: (rows, kv heads, key width); of the pool's dtype, or floats where it is 8-bit.
            values: (rows, kv heads, value width), likewise.
            slots: int64 (rows,), distinct but for those of block 0, which is for padding.
            block_size: slots per block.
        """
        ...

    def copy_blocks(
        self,
        layers: Sequence[LayerKv],
        *,
        source_block_ids: Tensor,
        target_block_ids: Tensor,
        token_counts: Tensor,
        block_size: int,
    ) -> None:
        """Copies the first ``token_counts[i]`` tokens of each source block, in all layers.

        The rest of a target keeps what it held.

        Args:
            layers: the pools.
            source_block_ids: int64 (copies,); no block is both a source and a target.
            target_block_ids: int64 (copies,), distinct.
            token_counts: int64 (copies,), each between 0 and ``block_size``.
            block_size: slots per block.
        """
        ...


class TorchPoolWriter:
    """Plain torch, on any device."""

    def store(
        self, layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
    ) -> None:
        """See the protocol."""
        for rows, pool, scales in (
            (keys, layer.keys, layer.key_scales),
            (values, layer.values, layer.value_scales),
        ):
            if scales is None:
                store_rows(pool, rows, slots)
            else:
                quantized = quantize_rows(rows, pool.dtype)
                store_rows(pool, quantized.elements, slots)
                store_rows(scales, quantized.scales, slots)

    def copy_blocks(
        self,
        layers: Sequence[LayerKv],
        *,
        source_block_ids: Tensor,
        target_block_ids: Tensor,
        token_counts: Tensor,
        block_size: int,
    ) -> None:
        """See the protocol."""
        source_slots = block_slots(source_block_ids, token_counts, block_size=block_size)
        target_slots = block_slots(target_block_ids, token_counts, block_size=block_size)
        for layer in layers:
            for pool in layer.tensors:
                copy_slots(pool, source_slots=source_slots, target_slots=target_slots)


def pool_writer(device: torch.device) -> PoolWriter:
    """The writer for pools on a device: kernels on GPUs, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchPoolWriter()
    # Imported here: triton is needed only where its kernels run.
    from prefixd.kernels.kernel_writer import KernelPoolWriter

    return KernelPoolWriter()


def store_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes ``rows[i]`` to ``pool[slots[i]]``.

    Args:
        pool: (slots, heads, ...).
        rows: (rows, heads, ...), of the pool's dtype; any strides.
        slots: int64 (rows,). A slot named twice holds either of its rows afterwards.
    """
    assert rows.shape == (slots.shape[0], *pool.shape[1:]), (rows.shape, slots.shape, pool.shape)
    assert rows.dtype == pool.dtype, (rows.dtype, pool.dtype)
    as_movable(pool).index_copy_(0, slots, as_movable(rows))


def copy_slots(pool: Tensor, *, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies ``pool[source_slots[i]]`` to ``pool[target_slots[i]]``; every source is read first.

    Args:
        pool: (slots, heads, ...).
        source_slots: int64 (rows,).
        target_slots: int64 (rows,), distinct.
    """
    assert source_slots.shape == target_slots.shape, (source_slots.shape, target_slots.shape)
    pool = as_movable(pool)
    pool.index_copy_(0, target_slots, pool.index_select(0, source_slots))


def block_slots(block_ids: Tensor, token_counts: Tensor, *, block_size: int) -> Tensor:
    """Slots of the first ``token_counts[i]`` tokens of each block, one block behind the other.

    Args:
        block_ids: int64 (blocks,).
        token_counts: int64 (blocks,), each between 0 and ``block_size``.
        block_size: slots per block.

    Returns:
        int64 (sum of token_counts,).
    """
    offsets = torch.arange(block_size, device=block_ids.device)
    slots = block_ids[:, None] * block_size + offsets
    return slots[offsets < token_counts[:, None]]
