"""What the device can do at all: copies and matrix products through torch."""

import statistics

import torch

from bench.gpu_parts.clock import Clock
from bench.gpu_parts.sizes import AttentionSizes


def copy_bytes_per_s(sizes: AttentionSizes, device: torch.device, clock: Clock) -> float:
    """Bytes that a large copy on the device reads and writes per second."""
    source = torch.ones(sizes.copied_byte_count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    durations = clock.eager_s(lambda: target.copy_(source), repeat_count=sizes.repeat_count)
    return 2 * sizes.copied_byte_count / statistics.median(durations)


def matmul_operations_per_s(sizes: AttentionSizes, device: torch.device, clock: Clock) -> float:
    """Products and sums per second of a large product of random matrices, in attention's dtype."""
    width = sizes.matmul_width
    left, right, product = (
        torch.empty((width, width), dtype=sizes.geometry.dtype, device=device) for _ in range(3)
    )
    left.normal_()
    right.normal_()
    durations = clock.eager_s(
        lambda: torch.matmul(left, right, out=product), repeat_count=sizes.repeat_count
    )
    return 2 * width**3 / statistics.median(durations)
