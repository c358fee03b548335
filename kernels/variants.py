"""The kernels as the worker launches them, for every kind of layer that it serves.

The launches come from the launchers themselves, on tensors without memory (device "meta"), so what
is compiled here is what runs later.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from prefixd.kernels.attention import attention_launches
from prefixd.kernels.copy_blocks import copy_launches
from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import FP8_DTYPE, LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.planner import plan_sizes, plan_work
from prefixd.kernels.store import store_launches
from prefixd.kernels.tiling import tiling_of_layer
from prefixd.kernels.work_buffers import work_tensors
from prefixd.kernels.work_list import PassLayout

HEAD_WIDTHS = (64, 80, 96, 128, 256)
QUERY_HEAD_COUNT = 16
"""Of every kind, as are the next two."""
KV_HEAD_COUNT = 4
BLOCK_SIZE = 16

_META = torch.device("meta")
_BLOCK_COUNT = 512
_DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    FP8_DTYPE: "fp8",
}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        key_width, value_width: elements per head.
        dtype: of queries, and of K and V unless they are 8-bit.
        kv_dtype: of K and V.
        has_all_options: whether it has a window, a softcap and sinks; otherwise it has none.
    """

    key_width: int
    value_width: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    has_all_options: bool = False

    @property
    def name(self) -> str:
        """Short, for reports."""
        width = str(self.key_width)
        if self.value_width != self.key_width:
            width += f"/{self.value_width}"
        kv = "" if self.kv_dtype == self.dtype else f"+{_DTYPE_NAMES[self.kv_dtype]}"
        options = " all options" if self.has_all_options else ""
        return f"{width} {_DTYPE_NAMES[self.dtype]}{kv}{options}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel for one kind of layer."""

    name: str
    kind: LayerKind
    launch: Launch


def default_kinds() -> list[LayerKind]:
    """What the report covers unless told otherwise."""
    bf16 = torch.bfloat16
    kinds = []
    for width in HEAD_WIDTHS:
        kinds += [LayerKind(width, width, bf16, kv) for kv in (bf16, torch.int8, FP8_DTYPE)]
        kinds.append(LayerKind(width, width, bf16, bf16, has_all_options=True))
        kinds += [LayerKind(width, width, t, t) for t in (torch.float16, torch.float32)]
    kinds.append(LayerKind(192, 128, bf16, bf16))
    return kinds


def small_kinds() -> list[LayerKind]:
    """One that shows whether anything compiles at all."""
    return [LayerKind(64, 64, torch.bfloat16, torch.int8)]


def variants_of(kind: LayerKind) -> Iterator[Variant]:
    """Every kernel of one kind of layer."""
    layer = _layer(kind)
    for label, launch in zip(
        ("attend narrow", "attend wide", "attend whole", "reduce"),
        _attention(kind, layer),
        strict=True,
    ):
        yield Variant(f"{label} {kind.name}", kind, launch)
    (store,) = _store(kind, layer)
    yield Variant(f"store {kind.name}", kind, store)
    (copy,) = _copy(layer)
    yield Variant(f"copy {kind.name}", kind, copy)


def _layer(kind: LayerKind) -> LayerKv:
    def pool(width: int) -> torch.Tensor:
        shape = (_BLOCK_COUNT * BLOCK_SIZE, KV_HEAD_COUNT, width)
        return torch.empty(shape, dtype=kind.kv_dtype, device=_META)

    scales = None
    if kind.kv_dtype != kind.dtype:
        scales = torch.empty((_BLOCK_COUNT * BLOCK_SIZE, KV_HEAD_COUNT), device=_META)
    return LayerKv(pool(kind.key_width), pool(kind.value_width), scales, scales)


def _attention(kind: LayerKind, layer: LayerKv) -> list[Launch]:
    """Launches for a decode, a short chunk and a long one: narrow, wide and whole items."""
    query_counts = np.array([1, 40, 300], np.int64)
    contexts = np.array([100, 700, 1200], np.int64)
    layout = PassLayout(
        np.ones((3, 80), np.int32),
        np.cumsum(query_counts) - query_counts,
        query_counts,
        contexts,
        int(query_counts.sum()),
        BLOCK_SIZE,
        _BLOCK_COUNT,
    )
    options = AttentionOptions(scaling=kind.key_width**-0.5)
    if kind.has_all_options:
        sinks = torch.empty(QUERY_HEAD_COUNT, dtype=kind.dtype, device=_META)
        options = AttentionOptions(options.scaling, 128, 50.0, sinks)
    group_size = QUERY_HEAD_COUNT // KV_HEAD_COUNT
    shape = (layout.row_count, QUERY_HEAD_COUNT)
    query = torch.empty((*shape, kind.key_width), dtype=kind.dtype, device=_META)
    output = torch.empty((*shape, kind.value_width), dtype=kind.dtype, device=_META)
    tiling = tiling_of_layer(query, layer)
    window = options.window_token_count
    sizes = plan_sizes(tiling, group_size=group_size, window_token_count=window)
    work = work_tensors(layout, plan_work(layout, sizes), device=_META)
    return attention_launches(query, layer, work, options, tiling, output=output)


def _store(kind: LayerKind, layer: LayerKv) -> list[Launch]:
    shape = (64, KV_HEAD_COUNT)
    return store_launches(
        layer,
        keys=torch.empty((*shape, kind.key_width), dtype=kind.dtype, device=_META),
        values=torch.empty((*shape, kind.value_width), dtype=kind.dtype, device=_META),
        slots=torch.empty(64, dtype=torch.int64, device=_META),
        block_size=BLOCK_SIZE,
    )


def _copy(layer: LayerKv) -> list[Launch]:
    ids = torch.empty(3, dtype=torch.int64, device=_META)
    return copy_launches(
        layer.keys,
        source_block_ids=ids,
        target_block_ids=ids,
        token_counts=ids,
        block_size=BLOCK_SIZE,
    )
