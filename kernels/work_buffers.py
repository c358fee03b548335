"""Work lists on a device: one buffer, one transfer per pass, the same addresses every time.

Buffers with room to spare serve CUDA graphs: what a pass leaves empty is padding that programs skip
(items without rows, reductions of rows that do not exist). Buffers cut to a pass serve eager runs.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from prefixd.kernels.work_list import (
    ITEM_FIELDS,
    REDUCTION_FIELDS,
    Int32Array,
    PassLayout,
    PlanSizes,
    WorkList,
)


class WorkTooLarge(ValueError):
    """A pass does not fit in static buffers."""

    def __init__(self, *, name: str, needed: int, capacity: int) -> None:
        super().__init__(f"the pass needs {needed} {name}, the buffers hold {capacity}")
        self.name = name
        self.needed = needed
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class WorkCapacity:
    """How much a set of buffers holds: the counts of ``WorkTensors``' first axes."""

    rows: int
    sequences: int
    blocks_per_sequence: int
    narrow_items: int
    wide_items: int
    whole_items: int
    listed_rows: int
    partials: int
    reductions: int


@dataclass(frozen=True, slots=True)
class WorkTensors:
    """A work list as the kernels read it, all int32 on one device.

    Attributes:
        narrow_items, wide_items, whole_items: (items, fields), see ``WorkList``.
        rows: (listed rows,).
        reductions: (reductions, fields).
        partial_order: (partials,).
        positions: (rows,), position of every row of the pass, 0 for padding.
        block_tables: (sequences, blocks).
        block_size: slots per block.
        block_count: blocks of the pool.
        sizes: what the list was made for.
    """

    narrow_items: Tensor
    wide_items: Tensor
    whole_items: Tensor
    rows: Tensor
    reductions: Tensor
    partial_order: Tensor
    positions: Tensor
    block_tables: Tensor
    block_size: int
    block_count: int
    sizes: PlanSizes

    @property
    def partial_count(self) -> int:
        """Partial results that there is room for."""
        return self.partial_order.shape[0]


def capacity_of(layout: PassLayout, work: WorkList) -> WorkCapacity:
    """The capacity that one pass needs, to the entry."""
    return WorkCapacity(
        rows=layout.row_count,
        sequences=layout.block_tables.shape[0],
        blocks_per_sequence=layout.block_tables.shape[1],
        narrow_items=len(work.narrow_items),
        wide_items=len(work.wide_items),
        whole_items=len(work.whole_items),
        listed_rows=len(work.rows),
        partials=work.partial_count,
        reductions=len(work.reductions),
    )


def decode_capacity(
    sizes: PlanSizes, *, sequence_count: int, blocks_per_sequence: int, block_size: int
) -> WorkCapacity:
    """The capacity that any pass of decode needs, whatever it shares.

    Args:
        sizes: plan sizes; nothing may be a long query with one row.
        sequence_count: sequences, and rows, at most.
        blocks_per_sequence: blocks of the longest table at most.
        block_size: slots per block.
    """
    assert sizes.long_query_row_count > 1, sizes
    token_count = blocks_per_sequence * block_size
    split_count = -(-token_count // sizes.split_token_count)
    if sizes.window_token_count is not None:
        # A window touches one split more than it fills.
        window_split_count = -(-sizes.window_token_count // sizes.split_token_count) + 1
        split_count = min(split_count, window_split_count)
    unit_count = sequence_count * split_count
    return WorkCapacity(
        rows=sequence_count,
        sequences=sequence_count,
        blocks_per_sequence=blocks_per_sequence,
        narrow_items=unit_count,
        # A wide item is full, or holds more rows than a narrow one could.
        wide_items=unit_count // min(sizes.narrow_row_count + 1, sizes.wide_row_count),
        whole_items=0,
        listed_rows=unit_count,
        partials=unit_count,
        reductions=sequence_count,
    )


class WorkBuffers:
    """Static buffers for work lists of one block size, pool and plan sizes.

    Invariants: the tensors never move and never change size; padding does nothing.
    """

    def __init__(
        self,
        capacity: WorkCapacity,
        *,
        block_size: int,
        block_count: int,
        sizes: PlanSizes,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        shapes = {
            "narrow_items": (capacity.narrow_items, len(ITEM_FIELDS)),
            "wide_items": (capacity.wide_items, len(ITEM_FIELDS)),
            "whole_items": (capacity.whole_items, len(ITEM_FIELDS)),
            "rows": (capacity.listed_rows,),
            "reductions": (capacity.reductions, len(REDUCTION_FIELDS)),
            "partial_order": (capacity.partials,),
            "positions": (capacity.rows,),
            "block_tables": (capacity.sequences, capacity.blocks_per_sequence),
        }
        # Each part begins at a multiple of 16 bytes, as the kernels' vector loads like it.
        lengths = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        starts, end = {}, 0
        for name, length in lengths.items():
            starts[name] = end
            end += -(-length // 4) * 4
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        host = self._host.numpy()

        def part(buffer: Tensor, name: str) -> Tensor:
            start = starts[name]
            return buffer[start : start + lengths[name]].view(shapes[name])

        self._parts: dict[str, Int32Array] = {
            name: host[starts[name] : starts[name] + lengths[name]].reshape(shapes[name])
            for name in shapes
        }
        self.tensors = WorkTensors(
            **{name: part(self._device, name) for name in shapes},
            block_size=block_size,
            block_count=block_count,
            sizes=sizes,
        )

    def load(self, layout: PassLayout, work: WorkList) -> WorkTensors:
        """Writes one pass into the buffers; whatever reads them must have run.

        Raises:
            WorkTooLarge: the pass does not fit; nothing was written.
        """
        self._check(layout, work)
        for name in ("narrow_items", "wide_items", "whole_items", "rows"):
            _fill(self._parts[name], getattr(work, name))
        _fill(self._parts["partial_order"], work.partial_order)
        _fill(self._parts["positions"], layout.positions())
        reductions = self._parts["reductions"]
        _fill(reductions, work.reductions)
        # Rows of the pass that exist only in the buffers become zeros; there is no row behind them.
        spare = len(reductions) - len(work.reductions)
        reductions[len(work.reductions) :, 0] = layout.row_count + np.arange(spare)
        table = self._parts["block_tables"]
        row_count, block_count = layout.block_tables.shape
        table[:row_count, :block_count] = layout.block_tables
        self._device.copy_(self._host, non_blocking=True)
        return self.tensors

    def _check(self, layout: PassLayout, work: WorkList) -> None:
        tensors = self.tensors
        assert layout.block_size == tensors.block_size, (layout.block_size, tensors.block_size)
        assert layout.block_count == tensors.block_count, (layout.block_count, tensors.block_count)
        assert work.sizes == tensors.sizes, (work.sizes, tensors.sizes)
        needed = capacity_of(layout, work)
        for field in fields(WorkCapacity):
            count, capacity = getattr(needed, field.name), getattr(self.capacity, field.name)
            if count > capacity:
                raise WorkTooLarge(name=field.name, needed=count, capacity=capacity)


def work_tensors(layout: PassLayout, work: WorkList, *, device: torch.device) -> WorkTensors:
    """A pass on a device, in buffers cut to it."""
    buffers = WorkBuffers(
        capacity_of(layout, work),
        block_size=layout.block_size,
        block_count=layout.block_count,
        sizes=work.sizes,
        device=device,
    )
    return buffers.load(layout, work)


def _fill(part: Int32Array, values: Int32Array) -> None:
    part[: len(values)] = values
    part[len(values) :] = 0
