"""Where a stretch of a block table lies in the pool: a slice where it can be, else its slots."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv, as_movable, dequantize_into

# A shorter run of consecutive blocks is cheaper to gather with its neighbours than to read alone.
RUN_TOKEN_COUNT_MIN = 64


class ReadBuffer:
    """Memory that reads of one pass write to in turn, where they cannot be views of the pool.

    A fresh tensor per read would cost many times the copy itself: the allocator hands large ones
    back to the system, and each of their pages faults anew.

    Invariant: a read is used up before the next one.
    """

    def __init__(self) -> None:
        self._gathered = Memory()
        self._floats = Memory()

    def keys(self, layer: LayerKv, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """K at some slots as floats, valid until the next read.

        Args:
            layer: the layer's pool.
            slots: a slice, or int64 (tokens,).
            dtype: of the result; that of the pool, unless it is 8-bit.

        Returns:
            (tokens, kv heads, key width), a view of the pool where it can be.
        """
        return self._read(layer.keys, layer.key_scales, slots, dtype)

    def values(self, layer: LayerKv, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """V at some slots, likewise: (tokens, kv heads, value width)."""
        return self._read(layer.values, layer.value_scales, slots, dtype)

    def _read(
        self, pool: Tensor, scales: Tensor | None, slots: slice | Tensor, dtype: torch.dtype
    ) -> Tensor:
        elements = pool[slots] if isinstance(slots, slice) else self._gather(pool, slots)
        if scales is None:
            assert elements.dtype == dtype, (elements.dtype, dtype)
            return elements
        floats = self._floats.tensor(elements.shape, dtype, elements.device)
        dequantize_into(floats, elements, scales[slots])
        return floats

    def _gather(self, pool: Tensor, slots: Tensor) -> Tensor:
        movable = as_movable(pool)
        shape = torch.Size((slots.shape[0], *pool.shape[1:]))
        gathered = self._gathered.tensor(shape, movable.dtype, pool.device)
        torch.index_select(movable, 0, slots, out=gathered)
        return gathered.view(pool.dtype)


class Memory:
    """One tensor that grows as it must."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def tensor(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in it, valid until the next."""
        memory, count = self._memory, math.prod(shape)
        if memory.numel() < count or (memory.dtype, memory.device) != (dtype, device):
            memory = self._memory = torch.empty(count, dtype=dtype, device=device)
        return memory[:count].view(shape)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions [first, end) of a sequence and the slots that hold them, a slice or one by one."""

    first_position: int
    end_position: int
    slots: slice | Tensor

    @property
    def token_count(self) -> int:
        """Positions it covers."""
        return self.end_position - self.first_position


def whole_stretch(
    blocks: NDArray[np.int64],
    *,
    first_position: int,
    end_position: int,
    block_size: int,
    device: torch.device,
) -> Stretch:
    """One stretch over positions [first, end) of a block table: a slice only if all is one run."""
    table = blocks[first_position // block_size : -(-end_position // block_size)]
    if (np.diff(table) == 1).all():
        start = int(table[0]) * block_size + first_position % block_size
        slots: slice | Tensor = slice(start, start + end_position - first_position)
    else:
        positions = np.arange(first_position, end_position)
        slots = torch.from_numpy(_slots_of(blocks, positions, block_size)).to(device)
    return Stretch(first_position, end_position, slots)


def split_stretches(
    blocks: NDArray[np.int64],
    *,
    first_position: int,
    end_position: int,
    block_size: int,
    device: torch.device,
) -> Iterator[Stretch]:
    """Positions [first, end) of a block table as slices for long runs, the rest gathered.

    ``first_position`` begins a block.
    """
    assert first_position % block_size == 0, (first_position, block_size)
    first_block = first_position // block_size
    table = blocks[first_block : -(-end_position // block_size)]
    borders = [0, *(np.flatnonzero(np.diff(table) != 1) + 1).tolist(), len(table)]
    pending = first_position
    for start, end in pairwise(borders):
        run_first = first_position + start * block_size
        run_end = min(first_position + end * block_size, end_position)
        if run_end - run_first < RUN_TOKEN_COUNT_MIN:
            continue
        if pending < run_first:
            positions = np.arange(pending, run_first)
            slots = torch.from_numpy(_slots_of(blocks, positions, block_size)).to(device)
            yield Stretch(pending, run_first, slots)
        slot = int(table[start]) * block_size
        yield Stretch(run_first, run_end, slice(slot, slot + run_end - run_first))
        pending = run_end
    if pending < end_position:
        positions = np.arange(pending, end_position)
        slots = torch.from_numpy(_slots_of(blocks, positions, block_size)).to(device)
        yield Stretch(pending, end_position, slots)


def _slots_of(
    blocks: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    return blocks[positions // block_size] * block_size + positions % block_size
