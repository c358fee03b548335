"""Paged attention of one layer as a piece of work that a clock can measure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.gpu_parts.lines import Check
from bench.gpu_parts.tolerance import ERROR_MAX, ERROR_UNIT, row_errors
from prefixd.kernels.attention import attention_launches
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.oracle import Geometry, Scene, exact_answer
from prefixd.kernels.planner import plan_sizes, plan_work
from prefixd.kernels.tiling import Tiling, tiling_of_layer
from prefixd.kernels.work_buffers import WorkTensors, work_tensors
from prefixd.kernels.work_list import Int32Array, Int64Array, PassLayout

_SEED = 11


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """One pass over one layer of random KV.

    Attributes:
        layout: of the pass.
        query: (rows, query heads, key width).
        layer: the pool.
        work: who reads what.
        tiling: of the layer.
        output: (rows, query heads, value width).
    """

    layout: PassLayout
    query: Tensor
    layer: LayerKv
    work: WorkTensors
    tiling: Tiling
    output: Tensor

    @property
    def options(self) -> AttentionOptions:
        """What the layer asks of attention."""
        return AttentionOptions(scaling=self.layer.key_width**-0.5)

    def run(self) -> None:
        """Starts the kernels of the pass."""
        for launch in attention_launches(
            self.query, self.layer, self.work, self.options, self.tiling, output=self.output
        ):
            launch.run()

    def last_row_check(self, *, kernel: str, name: str) -> Check:
        """Runs the pass and compares its last row with the oracle.

        Pools here are larger than those of the other checks, and offsets in them longer.
        """
        self.output.fill_(torch.nan)
        self.run()
        expected = exact_answer(self._last_row(), self.options)
        error = float(row_errors(self.output[-1:].cpu(), expected))
        return Check(kernel, name, error, ERROR_MAX[self.query.dtype], ERROR_UNIT)

    def _last_row(self) -> Scene:
        """A pass of the last row alone, on the CPU, in a pool that holds no other sequence."""
        block_size = self.layout.block_size
        table = self.layout.block_tables[-1].astype(np.int64)
        # Block 0 stays what it is.
        slots = (np.append(0, table)[:, None] * block_size + np.arange(block_size)).reshape(-1)
        ids = np.arange(1, len(table) + 1, dtype=np.int32)[None]
        context = int(self.layout.context_token_counts[-1])
        layer = LayerKv(*(_rows_on_cpu(tensor, slots) for tensor in self.layer.tensors))
        return Scene(
            layout_of(ids, [(1, context)], block_size=block_size), layer, self.query[-1:].cpu()
        )


def separate_tables(*, sequence_count: int, block_count: int) -> Int32Array:
    """Block tables that share nothing, scattered over a pool: int32 (sequences, blocks)."""
    generator = np.random.default_rng(_SEED)
    ids = generator.permutation(sequence_count * block_count) + 1
    return ids.reshape(sequence_count, block_count).astype(np.int32)


def shared_tables(
    *, sequence_count: int, shared_block_count: int, own_block_count: int
) -> Int32Array:
    """Block tables with a common prefix, scattered over a pool: int32 (sequences, blocks)."""
    generator = np.random.default_rng(_SEED)
    ids = generator.permutation(shared_block_count + sequence_count * own_block_count) + 1
    shared, own = ids[:shared_block_count], ids[shared_block_count:]
    everywhere = np.broadcast_to(shared, (sequence_count, len(shared)))
    return np.concatenate([everywhere, own.reshape(sequence_count, -1)], axis=1).astype(np.int32)


def layout_of(
    tables: Int32Array, queries_and_contexts: Sequence[tuple[int, int]], *, block_size: int
) -> PassLayout:
    """A pass over these tables, in a pool that has just their blocks."""
    query_counts = np.array([query for query, _ in queries_and_contexts], np.int64)
    contexts = np.array([context for _, context in queries_and_contexts], np.int64)
    ends = np.cumsum(query_counts)
    return PassLayout(
        tables,
        ends - query_counts,
        query_counts,
        contexts,
        row_count=int(ends[-1]),
        block_size=block_size,
        block_count=int(tables.max()) + 1,
    )


def attention_pass(
    layout: PassLayout,
    geometry: Geometry,
    device: torch.device,
    *,
    planned_as: PassLayout | None = None,
) -> AttentionPass:
    """Random KV and queries for a layout.

    Args:
        layout: of the pass.
        geometry: of the layer.
        device: where it is.
        planned_as: a layout of the same sequences, by whose tables it is planned which of them
            share; None: by their own.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    slot_count = layout.block_count * layout.block_size
    layer = random_layer(geometry, slot_count=slot_count, generator=generator)
    shape = (layout.row_count, geometry.query_head_count)
    query = torch.empty((*shape, geometry.key_width), dtype=geometry.dtype, device=device)
    query.normal_(generator=generator)
    tiling = tiling_of_layer(query, layer)
    group_size = geometry.query_head_count // geometry.kv_head_count
    sizes = plan_sizes(tiling, group_size=group_size, window_token_count=None)
    work = work_tensors(layout, plan_work(planned_as or layout, sizes), device=device)
    output = query.new_empty((*shape, geometry.value_width))
    return AttentionPass(layout, query, layer, work, tiling, output)


def random_layer(geometry: Geometry, *, slot_count: int, generator: torch.Generator) -> LayerKv:
    """A pool in which every slot is written, on the generator's device."""
    device = generator.device
    dtype = geometry.kv_dtype or geometry.dtype

    def pool(width: int) -> Tensor:
        shape = (slot_count, geometry.kv_head_count, width)
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=device, generator=generator)
        drawn = torch.empty(shape, dtype=geometry.dtype, device=device)
        return drawn.normal_(generator=generator).to(dtype)

    scales = None
    if geometry.kv_dtype is not None:
        scales = torch.full((slot_count, geometry.kv_head_count), 1 / 64, device=device)
    return LayerKv(pool(geometry.key_width), pool(geometry.value_width), scales, scales)


def kv_byte_count(layer: LayerKv, token_count: int) -> int:
    """Bytes of K and V, scales included, of so many tokens."""
    return token_count * sum(tensor[0].nbytes for tensor in layer.tensors)


def _rows_on_cpu(pool: Tensor, slots: Int64Array) -> Tensor:
    """Rows of a pool; as bytes, since not every device gathers every dtype."""
    at = torch.from_numpy(slots).to(pool.device)
    return pool.view(torch.uint8)[at].cpu().view(pool.dtype)
