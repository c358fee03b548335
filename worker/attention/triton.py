"""The backend for GPUs: one work list per pass, computed by the kernels of ``prefixd.kernels``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from prefixd.kernels.attention import paged_attention
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.planner import Planner, plan_sizes
from prefixd.kernels.tiling import GROUP_SIZE_MAX, HEAD_WIDTH_MAX, tiling_of_layer
from prefixd.kernels.work_buffers import (
    WorkBuffers,
    WorkTensors,
    decode_capacity,
    work_tensors,
)
from prefixd.kernels.work_list import PassLayout, PlanSizes
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.registry import BackendUnavailable
from prefixd.worker.attention.seam import LayerHeads, LayerTraits

PlannerKey: TypeAlias = tuple[int, PlanSizes]
"""Index of the KV group, and what its layers ask for."""


class TritonBackend:
    """Fast on GPUs; a row's result depends on the batch in the last bits.

    Where there is no GPU it runs only in triton's interpreter, which is for tests.
    """

    is_bitwise_reproducible = False

    def __init__(self) -> None:
        if not (torch.cuda.is_available() or knobs.runtime.interpret):
            raise BackendUnavailable(name="triton", reason="this machine has no usable GPU")
        self._planners: dict[PlannerKey, Planner] = {}
        # A step may have a pass of prompts before its recorded one, whose plan should outlive it.
        self._recorded_planners: dict[PlannerKey, Planner] = {}

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        """Serves layers whose heads the kernels have tiles for."""
        width = max(heads.key_width, heads.value_width)
        if width > HEAD_WIDTH_MAX:
            return (
                f"its heads of {width} elements are wider than the kernels' tiles of"
                f" {HEAD_WIDTH_MAX}; --attention-backend torch takes them"
            )
        group_size = heads.query_head_count // heads.kv_head_count
        if group_size > GROUP_SIZE_MAX:
            return (
                f"its {group_size} query heads per kv head are more than the {GROUP_SIZE_MAX} of"
                " the kernels' tiles; --attention-backend torch takes them"
            )
        return None

    def padded_row_count(self, token_count: int) -> int:
        """Needs no padding."""
        return token_count

    def plan(self, batch: AttentionBatch) -> "TritonPlan":
        """Prepares nothing yet: what to plan for shows with the first layer."""
        return TritonPlan(batch, self._planners)

    def static_plan(self, *, row_count: int, blocks_per_sequence: int) -> "StaticTritonPlan":
        """Makes a plan whose buffers have room for any such pass of decode."""
        return StaticTritonPlan(row_count, blocks_per_sequence, self._recorded_planners)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Work lists of the pass, one per kind of layer, made once and used by every layer.

    Planners outlive the pass: most steps of decode reuse the list of the step before.
    """

    batch: AttentionBatch
    planners: dict[PlannerKey, Planner]
    _work: dict[PlanSizes, WorkTensors] = field(default_factory=dict)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        return _attend(query, layer, traits, self._work_for)

    def _work_for(self, sizes: PlanSizes, layer: LayerKv) -> WorkTensors:
        if sizes not in self._work:
            block_count = layer.slot_count // self.batch.block_size
            layout = layout_of(self.batch, block_count=block_count)
            work = _planner(self.planners, self.batch, sizes).plan(layout)
            self._work[sizes] = work_tensors(layout, work, device=layer.keys.device)
        return self._work[sizes]


class StaticTritonPlan:
    """Work lists of passes of decode in buffers that never move, one per kind of layer.

    Invariant: the buffers are made by the first `attend`, which must not be recorded.
    """

    def __init__(
        self, row_count: int, blocks_per_sequence: int, planners: dict[PlannerKey, Planner]
    ) -> None:
        self._row_count = row_count
        self._blocks_per_sequence = blocks_per_sequence
        self._planners = planners
        self._buffers: dict[PlanSizes, WorkBuffers] = {}
        self._batch: AttentionBatch | None = None

    def load(self, batch: AttentionBatch) -> None:
        """See the seam."""
        assert batch.row_count == self._row_count, (batch.row_count, self._row_count)
        self._batch = batch
        for sizes, buffers in self._buffers.items():
            self._fill(buffers, batch, sizes)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        return _attend(query, layer, traits, self._work_for)

    def _work_for(self, sizes: PlanSizes, layer: LayerKv) -> WorkTensors:
        if sizes not in self._buffers:
            batch = self._batch
            assert batch is not None, "a pass is loaded"
            capacity = decode_capacity(
                sizes,
                sequence_count=self._row_count,
                blocks_per_sequence=self._blocks_per_sequence,
                block_size=batch.block_size,
            )
            buffers = WorkBuffers(
                capacity,
                block_size=batch.block_size,
                block_count=layer.slot_count // batch.block_size,
                sizes=sizes,
                device=layer.keys.device,
            )
            self._fill(buffers, batch, sizes)
            self._buffers[sizes] = buffers
        return self._buffers[sizes].tensors

    def _fill(self, buffers: WorkBuffers, batch: AttentionBatch, sizes: PlanSizes) -> None:
        layout = layout_of(batch, block_count=buffers.tensors.block_count)
        buffers.load(layout, _planner(self._planners, batch, sizes).plan(layout))


def _attend(
    query: Tensor,
    layer: LayerKv,
    traits: LayerTraits,
    work_for: Callable[[PlanSizes, LayerKv], WorkTensors],
) -> Tensor:
    tiling = tiling_of_layer(query, layer)
    sizes = plan_sizes(
        tiling,
        group_size=query.shape[1] // layer.head_count,
        window_token_count=traits.window_token_count,
    )
    options = AttentionOptions(
        traits.scaling, traits.window_token_count, traits.softcap, traits.sinks
    )
    return paged_attention(query, layer, work_for(sizes, layer), options, tiling)


def _planner(
    planners: dict[PlannerKey, Planner], batch: AttentionBatch, sizes: PlanSizes
) -> Planner:
    # Groups have tables of their own, so a planner that served two would reuse nothing.
    return planners.setdefault((batch.group_index, sizes), Planner(sizes))


def layout_of(batch: AttentionBatch, *, block_count: int) -> PassLayout:
    """A pass as the planner takes it, in a pool of so many blocks, block 0 included."""
    sequences = batch.sequences
    return PassLayout(
        batch.block_tables,
        np.array([rows.query_start for rows in sequences], np.int64),
        np.array([rows.query_token_count for rows in sequences], np.int64),
        np.array([rows.context_token_count for rows in sequences], np.int64),
        batch.row_count,
        batch.block_size,
        block_count,
    )
