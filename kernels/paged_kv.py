"""Stores and copies on a paged pool, as plain torch.

A pool tensor has shape (slots, heads, width); slot = block_id * block_size + offset.
"""

import torch
from torch import Tensor


def store_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes ``rows[i]`` to ``pool[slots[i]]``.

    Args:
        pool: (slots, heads, width).
        rows: (rows, heads, width), of the pool's dtype; any strides.
        slots: int64 (rows,). A slot named twice holds either of its rows afterwards.
    """
    assert rows.shape == (slots.shape[0], *pool.shape[1:]), (rows.shape, slots.shape, pool.shape)
    assert rows.dtype == pool.dtype, (rows.dtype, pool.dtype)
    pool.index_copy_(0, slots, rows)


def copy_slots(pool: Tensor, *, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies ``pool[source_slots[i]]`` to ``pool[target_slots[i]]``; every source is read first.

    Args:
        pool: (slots, heads, width).
        source_slots: int64 (rows,).
        target_slots: int64 (rows,), distinct.
    """
    assert source_slots.shape == target_slots.shape, (source_slots.shape, target_slots.shape)
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
