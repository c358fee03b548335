from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefixd.kernels import attention, reference
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.planner import PlanSizes, plan_work
from prefixd.kernels.tiling import Tile, Tiling
from prefixd.kernels.work_buffers import work_tensors
from tests.kernels.paged import Geometry, Scene, exact_answer, make_layout, make_scene

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPLIT = 32
TILING = Tiling(Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), split_token_count=SPLIT)

# Two sequences with a shared prefix of one split, a lone decode and a small chunk.
MIXED = ((1, 41), (1, 37), (1, 5), (6, 35))


def work_of(scene: Scene, options: AttentionOptions, *, long_query_row_count: int = 256) -> tuple:
    """The work tensors of a scene under `TILING`."""
    group_size = scene.query.shape[1] // scene.layer.head_count
    sizes = PlanSizes(
        TILING.narrow.query_row_count(group_size),
        TILING.wide.query_row_count(group_size),
        SPLIT,
        options.window_token_count,
        long_query_row_count,
    )
    work = plan_work(scene.layout, sizes)
    return work, work_tensors(scene.layout, work, device=torch.device("cpu"))


def check(scene: Scene, options: AttentionOptions, *, long_query_row_count: int = 256) -> Tensor:
    """Kernel and twin are both close to the exact answer; returns the kernel's."""
    _, work = work_of(scene, options, long_query_row_count=long_query_row_count)
    expected = exact_answer(scene, options)
    tolerance = TOLERANCES[scene.query.dtype]
    twin = reference.paged_attention(scene.query, scene.layer, work, options, TILING)
    torch.testing.assert_close(twin.double(), expected, atol=tolerance, rtol=tolerance)
    actual = attention.paged_attention(scene.query, scene.layer, work, options, TILING)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    return actual


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dtypes(dtype: torch.dtype) -> None:
    """Decode alone, decode over a shared prefix and a chunk, in one pass, in every dtype."""
    layout = make_layout(MIXED, block_size=8, shared_block_counts=(4,), padding_row_count=2)
    scene = make_scene(layout, Geometry(dtype=dtype))
    check(scene, AttentionOptions(scaling=0.25))
