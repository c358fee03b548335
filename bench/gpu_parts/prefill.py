"""Prefill of one layer as a share of the rate of matrix products."""

import statistics
from collections.abc import Iterator

import torch

from bench.figures import Figure
from bench.gpu_parts.attention import attention_pass, layout_of, separate_tables
from bench.gpu_parts.ceilings import matmul_operations_per_s
from bench.gpu_parts.clock import Clock
from bench.gpu_parts.lines import Line
from bench.gpu_parts.sizes import AttentionSizes

_BLOCK_SIZE = 16
_TARGET = 0.5


def prefill_rate(sizes: AttentionSizes, device: torch.device, clock: Clock) -> Iterator[Line]:
    """Measures products and sums per second of causal attention, only what is visible counted."""
    geometry = sizes.geometry
    product_rate = matmul_operations_per_s(sizes, device, clock)
    yield Figure("matrix product", product_rate / 1e12, "TFLOP/s")
    for index, (new, context) in enumerate(sizes.prefill):
        tables = separate_tables(sequence_count=1, block_count=-(-context // _BLOCK_SIZE))
        layout = layout_of(tables, [(new, context)], block_size=_BLOCK_SIZE)
        one = attention_pass(layout, geometry, device)
        name = f"{new:,} tokens, context {context:,}"
        yield one.last_row_check(kernel="prefill", name=name)
        seconds = statistics.median(clock.replayed_s(one.run, repeat_count=sizes.repeat_count))
        # Row i of the chunk sees context - new + i + 1 keys.
        pair_count = new * (context - new) + new * (new + 1) // 2
        widths = geometry.key_width + geometry.value_width
        rate = 2 * pair_count * geometry.query_head_count * widths / seconds
        yield Figure(
            f"prefill of {name}",
            rate / 1e12,
            "TFLOP/s",
            baseline="matrix product",
            baseline_value=product_rate / 1e12,
            ratio=rate / product_rate,
            target=_TARGET if index == 0 else None,
            at_least=True,
        )
