"""Copies the first tokens of blocks to other blocks of one pool tensor.

The slots of a block are adjacent, so a copy is one contiguous run, moved in the widest unit that
divides a slot: the kernel knows no dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixd.kernels.launch import Launch

UNIT_TILE = 1024

UNIT_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def copy_blocks_kernel(
    pool_ptr,
    source_ids_ptr,
    target_ids_ptr,
    token_counts_ptr,
    units_per_slot,
    units_per_block,
    UNITS: tl.constexpr,
):
    """Moves one tile of units of one copy; see ``copy_blocks``."""
    copy = tl.program_id(0)
    source = tl.load(source_ids_ptr + copy).to(tl.int64) * units_per_block
    target = tl.load(target_ids_ptr + copy).to(tl.int64) * units_per_block
    unit_count = tl.load(token_counts_ptr + copy).to(tl.int64) * units_per_slot
    units = tl.program_id(1).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    mask = units < unit_count
    tile = tl.load(pool_ptr + source + units, mask=mask)
    tl.store(pool_ptr + target + units, tile, mask=mask)


def copy_blocks(
    pool: Tensor,
    *,
    source_block_ids: Tensor,
    target_block_ids: Tensor,
    token_counts: Tensor,
    block_size: int,
) -> None:
    """Copies the first ``token_counts[i]`` slots of each source block to its target block.

    The rest of a target keeps what it held. Twin: ``reference.copy_blocks``.

    Args:
        pool: (slots, ...), contiguous: K, V or scales.
        source_block_ids: int64 (copies,); no block is both a source and a target.
        target_block_ids: int64 (copies,), distinct.
        token_counts: int64 (copies,), each between 0 and ``block_size``.
        block_size: slots per block.
    """
    launches = copy_launches(
        pool,
        source_block_ids=source_block_ids,
        target_block_ids=target_block_ids,
        token_counts=token_counts,
        block_size=block_size,
    )
    for launch in launches:
        launch.run()


def copy_launches(
    pool: Tensor,
    *,
    source_block_ids: Tensor,
    target_block_ids: Tensor,
    token_counts: Tensor,
    block_size: int,
) -> list[Launch]:
    """The launches of ``copy_blocks``: one, or none without copies."""
    check_copies(
        pool,
        source_block_ids=source_block_ids,
        target_block_ids=target_block_ids,
        token_counts=token_counts,
        block_size=block_size,
    )
    copy_count = source_block_ids.shape[0]
    if not copy_count:
        return []
    bytes_per_slot = pool[0].numel() * pool.element_size()
    unit = next(unit for unit in UNIT_DTYPES if bytes_per_slot % unit == 0)
    units_per_slot = bytes_per_slot // unit
    units_per_block = units_per_slot * block_size
    arguments = {
        "pool_ptr": pool.view(pool.shape[0], -1).view(UNIT_DTYPES[unit]),
        "source_ids_ptr": source_block_ids,
        "target_ids_ptr": target_block_ids,
        "token_counts_ptr": token_counts,
        "units_per_slot": units_per_slot,
        "units_per_block": units_per_block,
    }
    grid = (copy_count, -(-units_per_block // UNIT_TILE))
    return [Launch(copy_blocks_kernel, grid, arguments, {"UNITS": UNIT_TILE})]


def check_copies(
    pool: Tensor,
    *,
    source_block_ids: Tensor,
    target_block_ids: Tensor,
    token_counts: Tensor,
    block_size: int,
) -> None:
    """Asserts what ``copy_blocks`` asks of its arguments, but for the numbers in the tensors.

    Those are checked where they are plain numbers, before they are sent to a device.
    """
    assert pool.is_contiguous(), "the pool is contiguous"
    assert block_size >= 1, block_size
    assert pool.shape[0] % block_size == 0, (pool.shape, block_size)
    for tensor in (source_block_ids, target_block_ids, token_counts):
        assert tensor.dim() == 1, tensor.shape
        assert tensor.shape == source_block_ids.shape, (tensor.shape, source_block_ids.shape)
        assert tensor.dtype == torch.int64, tensor.dtype
        assert tensor.is_contiguous(), "lists are contiguous"
        assert tensor.device == pool.device, (tensor.device, pool.device)
