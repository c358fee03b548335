"""The backend for GPUs: one work list per pass, computed by the kernels of ``prefixd.kernels``."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from prefixd.kernels.attention import paged_attention
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.planner import Planner, plan_sizes
from prefixd.kernels.tiling import tiling_of_layer
from prefixd.kernels.work_buffers import WorkTensors, work_tensors
from prefixd.kernels.work_list import PassLayout, PlanSizes
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.registry import BackendUnavailable
from prefixd.worker.attention.seam import LayerTraits


class TritonBackend:
    """Fast on GPUs; a row's result depends on the batch in the last bits.

    Where there is no GPU it runs only in triton's interpreter, which is for tests.
    """

    is_bitwise_reproducible = False

    def __init__(self) -> None:
        if not (torch.cuda.is_available() or knobs.runtime.interpret):
            raise BackendUnavailable(name="triton", reason="this machine has no usable GPU")
        self._planners: dict[tuple[int, PlanSizes], Planner] = {}

    def refusal(self, traits: LayerTraits) -> str | None:
        """Serves every layer."""
        return None

    def padded_row_count(self, token_count: int) -> int:
        """Needs no padding."""
        return token_count

    def plan(self, batch: AttentionBatch) -> "TritonPlan":
        """Prepares nothing yet: what to plan for shows with the first layer."""
        return TritonPlan(batch, self._planners)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Work lists of the pass, one per kind of layer, made once and used by every layer.

    Planners outlive the pass: most steps of decode reuse the list of the step before.
    """

    batch: AttentionBatch
    planners: dict[tuple[int, PlanSizes], Planner]
    _work: dict[PlanSizes, WorkTensors] = field(default_factory=dict)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        group_size = query.shape[1] // layer.head_count
        tiling = tiling_of_layer(query, layer)
        sizes = plan_sizes(
            tiling, group_size=group_size, window_token_count=traits.window_token_count
        )
        options = AttentionOptions(
            traits.scaling, traits.window_token_count, traits.softcap, traits.sinks
        )
        return paged_attention(query, layer, self._work_for(sizes, layer), options, tiling)

    def _work_for(self, sizes: PlanSizes, layer: LayerKv) -> WorkTensors:
        if sizes not in self._work:
            layout = _layout_of(self.batch, slot_count=layer.slot_count)
            # Groups have tables of their own, so a planner that served two would reuse nothing.
            key = (self.batch.group_index, sizes)
            work = self.planners.setdefault(key, Planner(sizes)).plan(layout)
            self._work[sizes] = work_tensors(layout, work, device=layer.keys.device)
        return self._work[sizes]


def _layout_of(batch: AttentionBatch, *, slot_count: int) -> PassLayout:
    sequences = batch.sequences
    return PassLayout(
        batch.block_tables,
        np.array([rows.query_start for rows in sequences], np.int64),
        np.array([rows.query_token_count for rows in sequences], np.int64),
        np.array([rows.context_token_count for rows in sequences], np.int64),
        batch.row_count,
        batch.block_size,
        slot_count // batch.block_size,
    )
