"""What attention is, in float64: scenes to check kernels with, and their exact answers.

A scene is a pool full of NaN with some sequences in it. The oracle knows nothing of work lists,
splits or tiles: it reads each row's keys from the block table.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import QUANTIZED_MAXIMA, LayerKv, quantize_rows
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.work_list import PassLayout


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape and dtypes of a layer.

    Attributes:
        query_head_count, kv_head_count: heads; the former is a multiple of the latter.
        key_width, value_width: elements per head.
        dtype: of queries, and of K and V unless they are 8-bit.
        kv_dtype: an 8-bit format of K and V; None: they are of ``dtype``.
    """

    query_head_count: int = 2
    kv_head_count: int = 1
    key_width: int = 16
    value_width: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """One pass over one layer.

    Attributes:
        layout: of the pass.
        layer: the pool; every slot that no sequence has written holds NaN.
        query: (rows, query heads, key width).
    """

    layout: PassLayout
    layer: LayerKv
    query: Tensor

    def on(self, device: torch.device) -> "Scene":
        """The same scene on a device."""
        pools = (self.layer.keys, self.layer.values)
        scales = (self.layer.key_scales, self.layer.value_scales)
        layer = LayerKv(
            *(pool.to(device) for pool in pools),
            *(None if one is None else one.to(device) for one in scales),
        )
        return Scene(self.layout, layer, self.query.to(device))


def make_layout(
    queries_and_contexts: Sequence[tuple[int, int]],
    *,
    block_size: int,
    shared_block_counts: Sequence[int] = (),
    padding_row_count: int = 0,
    seed: int = 0,
) -> PassLayout:
    """Lays sequences out, one behind the other, with scattered block tables.

    Args:
        queries_and_contexts: tokens of each sequence in the pass, and once the pass has run.
        block_size: slots per block.
        shared_block_counts: how many leading blocks sequence i + 1 shares with sequence i; those
            behind the end share none.
        padding_row_count: rows behind the last sequence.
        seed: of the tables.
    """
    generator = np.random.default_rng(seed)
    counts = [-(-context // block_size) for _, context in queries_and_contexts]
    block_count = 1 + sum(counts) + 3
    fresh = iter((generator.permutation(block_count - 1) + 1).tolist())
    tables: list[list[int]] = []
    for index, count in enumerate(counts):
        shared = shared_block_counts[index - 1] if 0 < index <= len(shared_block_counts) else 0
        head = tables[-1][:shared] if tables else []
        tables.append([*head, *itertools.islice(fresh, count - len(head))])
    width = max(counts)
    table = np.zeros((len(counts), width), np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    query_counts = np.array([query for query, _ in queries_and_contexts], np.int64)
    ends = np.cumsum(query_counts)
    return PassLayout(
        table,
        ends - query_counts,
        query_counts,
        np.array([context for _, context in queries_and_contexts], np.int64),
        int(ends[-1]) + padding_row_count,
        block_size,
        block_count,
    )


def make_scene(layout: PassLayout, geometry: Geometry, *, seed: int = 0) -> Scene:
    """Random K, V and queries on the CPU, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    slot_count = layout.block_count * layout.block_size
    written = torch.zeros(slot_count, dtype=torch.bool)
    for index in range(len(layout.query_starts)):
        written[context_slots(layout, index)] = True

    def pool(width: int) -> tuple[Tensor, Tensor | None]:
        shape = (slot_count, geometry.kv_head_count, width)
        rows = torch.randn(shape, generator=generator)
        if geometry.kv_dtype in QUANTIZED_MAXIMA:
            quantized = quantize_rows(rows, geometry.kv_dtype)
            # int8 has no NaN, but its scale has.
            quantized.scales[~written] = torch.nan
            return quantized.elements, quantized.scales
        rows[~written] = torch.nan
        return rows.to(geometry.dtype), None

    keys, key_scales = pool(geometry.key_width)
    values, value_scales = pool(geometry.value_width)
    shape = (layout.row_count, geometry.query_head_count, geometry.key_width)
    query = torch.randn(shape, generator=generator).to(geometry.dtype)
    return Scene(layout, LayerKv(keys, values, key_scales, value_scales), query)


def context_slots(layout: PassLayout, index: int) -> Tensor:
    """Slots of all positions of one sequence: int64 (context tokens,)."""
    positions = np.arange(layout.context_token_counts[index])
    blocks = layout.block_tables[index, positions // layout.block_size].astype(np.int64)
    return torch.from_numpy(blocks * layout.block_size + positions % layout.block_size)


def exact_answer(scene: Scene, options: AttentionOptions) -> Tensor:
    """What attention is over a scene on the CPU: float64 (rows, query heads, value width).

    Padding rows are zeros.
    """
    layout, layer = scene.layout, scene.layer
    query = scene.query.double()
    answer = query.new_zeros((*query.shape[:2], layer.value_width))
    group_size = query.shape[1] // layer.head_count
    for index, query_start in enumerate(layout.query_starts):
        slots = context_slots(layout, index)
        for rank in range(int(layout.query_token_counts[index])):
            position = int(layout.start_positions[index]) + rank
            window = options.window_token_count
            first = 0 if window is None else max(0, position - window + 1)
            seen = slots[first : position + 1]
            keys = _read(layer.keys, layer.key_scales, seen).repeat_interleave(group_size, 1)
            values = _read(layer.values, layer.value_scales, seen).repeat_interleave(group_size, 1)
            row = int(query_start) + rank
            scores = torch.einsum("hw,khw->hk", query[row], keys) * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(seen)]
            answer[row] = torch.einsum("hk,khw->hw", weights, values)
    return answer


def _read(pool: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Some slots of a pool: float64 (tokens, kv heads, width)."""
    elements = pool[slots].double()
    return elements if scales is None else elements * scales[slots].double()[..., None]
