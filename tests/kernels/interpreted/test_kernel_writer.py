"""A pool that the kernels write is the one that plain torch writes."""

from __future__ import annotations

import pytest
import torch

from prefixd.kernels.kernel_writer import KernelPoolWriter
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.kernels.paged_kv import TorchPoolWriter
from prefixd.worker.model.kv_cache import LayerGeometry, PagedKv

GEOMETRY = (LayerGeometry(2, 16, 16), LayerGeometry(1, 24, 8))
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, FP8_DTYPE], ids=str)
def test_pools_hold_the_same_bits(dtype: torch.dtype) -> None:
    """Stores, then copies of a part of a block and of a whole one, on every page."""
    generator = torch.Generator().manual_seed(1)
    pools = [
        PagedKv(GEOMETRY, block_count=6, block_size=4, dtype=dtype, device=CPU, writer=writer)
        for writer in (KernelPoolWriter(), TorchPoolWriter())
    ]
    slots = torch.tensor([4, 5, 6, 7, 9, 8])
    for page, layer in enumerate(GEOMETRY):
        keys = torch.randn(6, layer.kv_head_count, layer.key_width, generator=generator)
        values = torch.randn(6, layer.kv_head_count, layer.value_width, generator=generator)
        for pool in pools:
            pool.store(page, keys=keys, values=values, slots=slots)
    for pool in pools:
        pool.copy_blocks(source_block_ids=[1, 2], target_block_ids=[5, 3], token_counts=[4, 1])
    by_kernel, by_torch = pools
    for page in range(len(GEOMETRY)):
        for actual, expected in zip(
            by_kernel.layer(page).tensors, by_torch.layer(page).tensors, strict=True
        ):
            assert actual.any()
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
