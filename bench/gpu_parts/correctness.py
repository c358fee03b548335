"""Every kernel variant that the device can run, against the oracle.

One pass per layer holds what every kernel is for: decodes over a shared prefix (wide items), what
each has behind it (narrow items), a short chunk, a long one (whole items) and padding. For layers
of the kernels report the launches are those of its variants: what it compiled is checked here.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from bench.gpu_parts.lines import Check
from bench.gpu_parts.sizes import CheckedLayer, CheckSizes
from bench.gpu_parts.tolerance import ERROR_MAX, ERROR_UNIT, row_errors
from prefixd.kernels import reference
from prefixd.kernels.attention import attention_launches
from prefixd.kernels.copy_blocks import copy_launches
from prefixd.kernels.launch import Launch
from prefixd.kernels.layer_kv import FP8_DTYPE, LayerKv, fp8_refusal
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.oracle import Geometry, Scene, exact_answer, make_layout, make_scene
from prefixd.kernels.planner import plan_sizes, plan_work
from prefixd.kernels.store import store_launches
from prefixd.kernels.tiling import tiling_of_layer
from prefixd.kernels.variants import LayerKind, Variant, variants_of
from prefixd.kernels.work_buffers import work_tensors
from prefixd.kernels.work_list import Int32Array, PassLayout, WorkList

_PADDING_ROW_COUNT = 2
_STORED_ROW_COUNT = 33
_SEED = 7
# Numbers of a layer that the report's kernels have, too, but another one of.
_HEAD_COUNTS = frozenset({"KV_HEADS", "HEADS"})


def correctness(sizes: CheckSizes, device: torch.device, *, limit_s: float) -> Iterator[Check]:
    """Checks every layer, in several processes, because kernels are compiled on the way.

    Raises:
        multiprocessing.TimeoutError: the limit was reached; layers in work are given up.
    """
    check = partial(check_layer, sizes=sizes, device=device)
    end_s = time.monotonic() + limit_s
    # A context of the device does not survive a fork.
    context = get_context("spawn")
    with context.Pool(sizes.process_count, torch.set_num_threads, (1,)) as pool:
        answers = pool.imap(check, sizes.layers)
        for _ in sizes.layers:
            yield from answers.next(max(0.0, end_s - time.monotonic()))


def check_layer(layer: CheckedLayer, *, sizes: CheckSizes, device: torch.device) -> list[Check]:
    """One line per kernel of one layer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kind = layer.kind
    variants = list(variants_of(kind))
    lines = [Check(variant.name.removesuffix(f" {kind.name}"), layer.name) for variant in variants]
    refusal = _refusal(kind, device)
    if refusal:
        return [replace(line, refusal=refusal) for line in lines]
    try:
        measured = _measure(layer, variants, sizes, device)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        return [replace(line, failure=failure) for line in lines]
    return [
        replace(line, error=one.error, error_max=one.error_max, unit=one.unit, failure=one.failure)
        for line, one in zip(lines, measured, strict=True)
    ]


def _refusal(kind: LayerKind, device: torch.device) -> str:
    if kind.kv_dtype != FP8_DTYPE or device.type != "cuda":
        return ""
    return fp8_refusal(torch.cuda.get_device_capability(device)) or ""


@dataclass(frozen=True, slots=True)
class _Measured:
    error: float
    error_max: float
    unit: str
    failure: str = ""


def _measure(
    layer: CheckedLayer, variants: list[Variant], sizes: CheckSizes, device: torch.device
) -> list[_Measured]:
    """In the order of the variants."""
    layout = _layout_of(sizes, block_size=layer.block_size)
    scene = make_scene(layout, _geometry_of(layer), seed=_SEED)
    attention, attention_measured = _attend(layer.kind, scene, sizes, device)
    store, store_measured = _store(scene, device)
    copy, copy_measured = _copy(scene, device)
    launches = [*attention, store, copy]
    measured = [*attention_measured, store_measured, copy_measured]
    if not layer.is_reported:
        return measured
    return [
        one if _is_same_kernel(launch, variant.launch) else replace(one, failure="other kernel")
        for one, launch, variant in zip(measured, launches, variants, strict=True)
    ]


def _is_same_kernel(launch: Launch, reported: Launch) -> bool:
    constants, reported_constants = (
        {name: value for name, value in one.constants.items() if name not in _HEAD_COUNTS}
        for one in (launch, reported)
    )
    return (
        launch.kernel is reported.kernel
        and constants == reported_constants
        and launch.options() == reported.options()
    )


def _layout_of(sizes: CheckSizes, *, block_size: int) -> PassLayout:
    shared = sizes.shared_token_count
    contexts = [
        (1, shared + 1 + index * sizes.own_token_count // sizes.sharing_count)
        for index in range(sizes.sharing_count)
    ]
    return make_layout(
        [*contexts, sizes.chunk, sizes.long_chunk],
        block_size=block_size,
        shared_block_counts=[shared // block_size] * (sizes.sharing_count - 1),
        padding_row_count=_PADDING_ROW_COUNT,
        seed=_SEED,
    )


def _geometry_of(layer: CheckedLayer) -> Geometry:
    kind = layer.kind
    return Geometry(
        layer.query_head_count,
        layer.kv_head_count,
        kind.key_width,
        kind.value_width,
        kind.dtype,
        None if kind.kv_dtype == kind.dtype else kind.kv_dtype,
    )


def _attend(
    kind: LayerKind, scene: Scene, sizes: CheckSizes, device: torch.device
) -> tuple[list[Launch], list[_Measured]]:
    """The launches of attention and what they are off: narrow, wide and whole items, the sums."""
    options = AttentionOptions(scaling=kind.key_width**-0.5)
    if kind.has_all_options:
        generator = torch.Generator().manual_seed(_SEED)
        sinks = torch.randn(scene.query.shape[1], generator=generator).to(kind.dtype)
        options = AttentionOptions(options.scaling, sizes.window_token_count, 50.0, sinks)
    tiling = replace(
        tiling_of_layer(scene.query, scene.layer), split_token_count=sizes.split_token_count
    )
    plan = plan_sizes(
        tiling,
        group_size=scene.query.shape[1] // scene.layer.head_count,
        window_token_count=options.window_token_count,
    )
    work = plan_work(scene.layout, replace(plan, long_query_row_count=sizes.long_query_row_count))
    there = scene.on(device)
    shape = (*scene.query.shape[:2], scene.layer.value_width)
    # What no kernel writes stays NaN, and is found.
    output = there.query.new_full(shape, torch.nan)
    launches = attention_launches(
        there.query,
        there.layer,
        work_tensors(scene.layout, work, device=device),
        replace(options, sinks=None if options.sinks is None else options.sinks.to(device)),
        tiling,
        output=output,
    )
    for launch in launches:
        launch.run()
    errors = row_errors(output.cpu(), exact_answer(scene, options))
    items = (work.narrow_items, work.wide_items, work.whole_items)
    rows = [*(_rows_of(one, work) for one in items), torch.from_numpy(work.reductions[:, 0])]
    error_max = ERROR_MAX[kind.dtype]
    return launches, [
        _Measured(float(errors[of_kernel.long()].max()), error_max, ERROR_UNIT)
        for of_kernel in rows
    ]


def _rows_of(items: Int32Array, work: WorkList) -> Tensor:
    """The rows of the pass that some items read for."""
    listed = [torch.from_numpy(work.rows[start : start + count]) for *_, start, count in items]
    return torch.cat(listed)


def _store(scene: Scene, device: torch.device) -> tuple[Launch, _Measured]:
    """New rows, and padding rows, in a copy of the pool."""
    layer, block_size = scene.layer, scene.layout.block_size
    generator = torch.Generator().manual_seed(_SEED)
    slots = torch.randperm(layer.slot_count - block_size, generator=generator) + block_size
    padding = torch.tensor([-1, 0, block_size - 1, layer.slot_count])
    slots = torch.cat([slots[:_STORED_ROW_COUNT], padding])

    def rows(width: int) -> Tensor:
        drawn = torch.randn((len(slots), layer.head_count, width), generator=generator)
        # Heads of very different sizes, which their scales should make up for.
        drawn *= torch.logspace(-3, 3, len(slots) * layer.head_count).view(len(slots), -1, 1)
        # Neither NaN, which untouched slots hold, nor anything that is stored elsewhere.
        drawn[_STORED_ROW_COUNT:] = 7.0
        return drawn.to(scene.query.dtype)

    keys, values = rows(layer.key_width), rows(layer.value_width)
    # On the CPU, a scene "on" the device is the scene itself.
    stored, twin = _clone(scene.on(device).layer), _clone(layer)
    (launch,) = store_launches(
        stored,
        keys=keys.to(device),
        values=values.to(device),
        slots=slots.to(device),
        block_size=block_size,
    )
    launch.run()
    reference.store_kv(twin, keys=keys, values=values, slots=slots, block_size=block_size)
    pairs = zip(stored.tensors, twin.tensors, strict=True)
    return launch, _Measured(sum(_bytes_off(*pair) for pair in pairs), 0, "bytes")


def _copy(scene: Scene, device: torch.device) -> tuple[Launch, _Measured]:
    """A part of a block, a whole one, and nothing of one."""
    pool, block_size = scene.layer.keys, scene.layout.block_size
    sources, targets = torch.tensor([1, 1, 3]), torch.tensor([2, 4, 5])
    counts = torch.tensor([block_size // 3, block_size, 0])
    copied, twin = pool.to(device, copy=True), pool.clone()
    (launch,) = copy_launches(
        copied,
        source_block_ids=sources.to(device),
        target_block_ids=targets.to(device),
        token_counts=counts.to(device),
        block_size=block_size,
    )
    launch.run()
    reference.copy_blocks(
        twin,
        source_block_ids=sources,
        target_block_ids=targets,
        token_counts=counts,
        block_size=block_size,
    )
    return launch, _Measured(_bytes_off(copied, twin), 0, "bytes")


def _clone(layer: LayerKv) -> LayerKv:
    scales = (layer.key_scales, layer.value_scales)
    cloned = (None if one is None else one.clone() for one in scales)
    return LayerKv(layer.keys.clone(), layer.values.clone(), *cloned)


def _bytes_off(actual: Tensor, expected: Tensor) -> int:
    """Bytes in which two tensors differ; NaN equals NaN."""
    return int((actual.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
