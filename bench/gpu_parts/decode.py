"""Decode of one layer: as a share of copy bandwidth, and over a shared prefix against without."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.figures import Figure
from bench.gpu_parts.attention import (
    AttentionPass,
    attention_pass,
    kv_byte_count,
    layout_of,
    separate_tables,
    shared_tables,
)
from bench.gpu_parts.ceilings import copy_bytes_per_s
from bench.gpu_parts.clock import Clock
from bench.gpu_parts.lines import Line
from bench.gpu_parts.sizes import AttentionSizes, DecodeCase
from prefixd.kernels.layer_kv import FP8_DTYPE, fp8_refusal
from prefixd.kernels.oracle import Geometry

_BLOCK_SIZE = 16
_SHARED_TARGET = 5.0


def decode_bandwidth(sizes: AttentionSizes, device: torch.device, clock: Clock) -> Iterator[Line]:
    """Measures KV bytes read per second, sums of partial results included, against a copy's."""
    copied = copy_bytes_per_s(sizes, device, clock)
    yield Figure("copy, read and written", copied / 1e9, "GB/s")
    for case in sizes.decode:
        yield from _bandwidth(case, sizes.geometry, copied, sizes, device, clock)
    eight_bit = [torch.int8, *([FP8_DTYPE] if _has_fp8(device) else [])]
    for kv_dtype in eight_bit:
        geometry = replace(sizes.geometry, kv_dtype=kv_dtype)
        yield from _bandwidth(sizes.eight_bit, geometry, copied, sizes, device, clock)


def _bandwidth(
    case: DecodeCase,
    geometry: Geometry,
    copied: float,
    sizes: AttentionSizes,
    device: torch.device,
    clock: Clock,
) -> Iterator[Line]:
    count, context = case.sequence_count, case.context_token_count
    tables = separate_tables(sequence_count=count, block_count=-(-context // _BLOCK_SIZE))
    layout = layout_of(tables, [(1, context)] * count, block_size=_BLOCK_SIZE)
    one = attention_pass(layout, geometry, device)
    kv = "" if geometry.kv_dtype is None else f", {str(geometry.kv_dtype).removeprefix('torch.')}"
    name = f"{count} x {context:,} tokens{kv}"
    yield one.last_row_check(kernel="decode", name=name)
    seconds = _seconds(one, sizes, clock)
    rate = kv_byte_count(one.layer, count * context) / seconds
    yield Figure(
        f"decode of {name}",
        rate / 1e9,
        "GB/s",
        baseline="copy",
        baseline_value=copied / 1e9,
        ratio=rate / copied,
        target=case.target,
        at_least=True,
    )


def shared_prefix(sizes: AttentionSizes, device: torch.device, clock: Clock) -> Iterator[Line]:
    """Measures decode over one shared prefix, read once, against reading it for every sequence.

    Twice: from the same blocks, most of which the device's cache holds, and from blocks of each
    sequence's own, as without prefix caching.
    """
    count, shared = sizes.sharing_count, sizes.shared_token_count
    own_block_count = -(-sizes.own_token_count // _BLOCK_SIZE)
    tables = shared_tables(
        sequence_count=count,
        shared_block_count=shared // _BLOCK_SIZE,
        own_block_count=own_block_count,
    )
    queries = [(1, shared + sizes.own_token_count)] * count
    layout = layout_of(tables, queries, block_size=_BLOCK_SIZE)
    apart = layout_of(
        separate_tables(sequence_count=count, block_count=tables.shape[1]),
        queries,
        block_size=_BLOCK_SIZE,
    )
    name = f"{count} x {shared:,} shared tokens"
    together = attention_pass(layout, sizes.geometry, device)
    yield together.last_row_check(kernel="read once", name=name)
    seconds = _seconds(together, sizes, clock)
    one_by_one = attention_pass(layout, sizes.geometry, device, planned_as=apart)
    yield one_by_one.last_row_check(kernel="read by each", name=name)
    yield _speed_up(name, "same blocks", seconds, _seconds(one_by_one, sizes, clock))
    unshared = attention_pass(apart, sizes.geometry, device)
    yield _speed_up(name, "own blocks", seconds, _seconds(unshared, sizes, clock))


def _speed_up(name: str, baseline: str, seconds: float, baseline_seconds: float) -> Figure:
    return Figure(
        f"decode of {name}, read once",
        seconds * 1e6,
        "us",
        baseline=f"read by each, {baseline}",
        baseline_value=baseline_seconds * 1e6,
        ratio=baseline_seconds / seconds,
        target=_SHARED_TARGET,
        at_least=True,
    )


def _seconds(one: AttentionPass, sizes: AttentionSizes, clock: Clock) -> float:
    return statistics.median(clock.replayed_s(one.run, repeat_count=sizes.repeat_count))


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return fp8_refusal(torch.cuda.get_device_capability(device)) is None
