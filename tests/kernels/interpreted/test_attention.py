from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixd.kernels import attention, reference
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.oracle import Geometry, Scene, exact_answer, make_layout, make_scene
from prefixd.kernels.planner import plan_work
from prefixd.kernels.tiling import Tile, Tiling
from prefixd.kernels.work_buffers import (
    WorkBuffers,
    WorkCapacity,
    WorkTooLarge,
    capacity_of,
    work_tensors,
)
from prefixd.kernels.work_list import PassLayout, PlanSizes, WorkList

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPLIT = 32
TILING = Tiling(Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), Tile(32, 16, 4, 2), split_token_count=SPLIT)
CPU = torch.device("cpu")
SIZES = PlanSizes(8, 16, 16, SPLIT, long_query_row_count=8)
PLAIN = AttentionOptions(scaling=0.25)

# Two decodes that share one split, a lone decode, and a small chunk.
MIXED = ((1, 41), (1, 37), (1, 5), (6, 35))


def mixed_layout(block_size: int = 8) -> PassLayout:
    """`MIXED` with two padding rows behind it."""
    shared = SPLIT // block_size
    return make_layout(
        MIXED, block_size=block_size, shared_block_counts=(shared,), padding_row_count=2
    )


def work_of(scene: Scene, options: AttentionOptions, *, long_query_row_count: int) -> WorkList:
    """The work list of a scene under `TILING`."""
    group_size = scene.query.shape[1] // scene.layer.head_count
    sizes = PlanSizes(
        TILING.narrow.query_row_count(group_size),
        TILING.wide.query_row_count(group_size),
        TILING.whole.query_row_count(group_size),
        SPLIT,
        options.window_token_count,
        long_query_row_count,
    )
    return plan_work(scene.layout, sizes)


def check(
    scene: Scene, options: AttentionOptions = PLAIN, *, long_query_row_count: int = 256
) -> Tensor:
    """Kernel and twin are both close to the exact answer; returns the kernel's."""
    work = work_of(scene, options, long_query_row_count=long_query_row_count)
    tensors = work_tensors(scene.layout, work, device=CPU)
    expected = exact_answer(scene, options)
    tolerance = TOLERANCES[scene.query.dtype]
    for attend in (reference.paged_attention, attention.paged_attention):
        actual = attend(scene.query, scene.layer, tensors, options, TILING)
        assert scene.query.dtype == actual.dtype
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    return actual


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_mixed_pass_in_every_dtype(dtype: torch.dtype) -> None:
    """Shared and lone decodes, a chunk and padding rows in one pass; unwritten slots hold NaN."""
    actual = check(make_scene(mixed_layout(), Geometry(dtype=dtype)))
    assert not actual[-2:].any()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_kv(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Elements times their scales, whatever the query's dtype; unwritten scales hold NaN."""
    check(make_scene(mixed_layout(), Geometry(dtype=dtype, kv_dtype=kv_dtype)))


@pytest.mark.parametrize(
    "context_token_count", [1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1]
)
def test_contexts_around_the_edges_of_splits(context_token_count: int) -> None:
    """One decode row at the first, last and next position of a split."""
    layout = make_layout([(1, context_token_count)], block_size=8)
    check(make_scene(layout, Geometry()))


@pytest.mark.parametrize("query_token_count", [1, 7, 8, 9, 33])
def test_chunks_around_the_edges_of_blocks(query_token_count: int) -> None:
    """Chunks that begin and end anywhere in blocks, tiles and splits."""
    layout = make_layout([(query_token_count, query_token_count + 5)], block_size=8)
    check(make_scene(layout, Geometry()))


def test_a_long_query_reads_its_context_in_one_go() -> None:
    """Whole items write their rows themselves, beside rows that are split."""
    layout = make_layout([(40, 71), (1, 40)], block_size=8, padding_row_count=1)
    scene = make_scene(layout, Geometry())
    assert len(work_of(scene, PLAIN, long_query_row_count=20).whole_items)
    check(scene, long_query_row_count=20)


@pytest.mark.parametrize("window", [1, 14, 16, 33, 1000])
def test_windows(window: int) -> None:
    """A query at q sees keys in (q - window, q]; what lies before may be freed and hold NaN."""
    layout = make_layout([(1, 70), (20, 45)], block_size=8)
    scene = make_scene(layout, Geometry())
    freed = max(0, 69 - window + 1) // 8
    layout.block_tables[0, :freed] = 0
    check(scene, replace(PLAIN, window_token_count=window))


def test_a_window_over_a_long_query() -> None:
    """Whole items start at the first position that their first row sees."""
    layout = make_layout([(40, 71)], block_size=8)
    options = replace(PLAIN, window_token_count=9)
    check(make_scene(layout, Geometry()), options, long_query_row_count=20)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap: float) -> None:
    """Scores are capped before they are masked."""
    check(make_scene(mixed_layout(), Geometry()), replace(PLAIN, softcap=softcap))


def test_softcap_of_scores_far_beyond_it() -> None:
    """The exponential inside tanh neither overflows nor gives NaN."""
    check(make_scene(mixed_layout(), Geometry()), AttentionOptions(scaling=1e4, softcap=2.0))


@pytest.mark.parametrize("long_query_row_count", [5, 256])
def test_sinks(long_query_row_count: int) -> None:
    """One more logit per head takes probability, in split and in whole items."""
    options = replace(PLAIN, sinks=torch.tensor([0.7, -1.5]))
    check(
        make_scene(mixed_layout(), Geometry()), options, long_query_row_count=long_query_row_count
    )


def test_sinks_far_above_all_scores() -> None:
    """A sink that takes nearly everything leaves small numbers, not NaN."""
    options = replace(PLAIN, sinks=torch.tensor([90.0, -90.0]))
    check(make_scene(mixed_layout(), Geometry()), options)


def test_everything_at_once() -> None:
    """Window, softcap, sinks, 8 bits, and values narrower than keys."""
    geometry = Geometry(4, 2, 24, 16, torch.float32, torch.int8)
    options = AttentionOptions(0.3, 21, 5.0, torch.tensor([0.1, 0.2, -0.3, 1.0]))
    check(make_scene(mixed_layout(), geometry), options, long_query_row_count=6)


@pytest.mark.parametrize(
    ("query_head_count", "kv_head_count"), [(2, 2), (3, 1), (9, 3), (6, 2), (16, 1), (20, 1)]
)
def test_groups(query_head_count: int, kv_head_count: int) -> None:
    """Query heads per kv head that fill a tile, divide it, or leave a rest."""
    layout = make_layout([(1, 9), (3, 20)], block_size=8)
    scene = make_scene(layout, Geometry(query_head_count, kv_head_count))
    if query_head_count // kv_head_count > TILING.narrow.row_tile:
        tiling = replace(TILING, narrow=TILING.wide)
        sizes = PlanSizes(1, 1, 1, SPLIT)
        tensors = work_tensors(layout, plan_work(layout, sizes), device=CPU)
        actual = attention.paged_attention(scene.query, scene.layer, tensors, PLAIN, tiling)
        expected = exact_answer(scene, PLAIN).float()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    else:
        check(scene)


@pytest.mark.parametrize(
    ("key_width", "value_width"), [(64, 64), (80, 80), (96, 96), (128, 128), (24, 16), (16, 48)]
)
def test_head_widths(key_width: int, value_width: int) -> None:
    """Widths that are no powers of two, and values of another width than keys."""
    layout = make_layout([(1, 9), (2, 35)], block_size=8)
    check(make_scene(layout, Geometry(key_width=key_width, value_width=value_width)))


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 64, 256])
def test_block_sizes(block_size: int) -> None:
    """Blocks smaller and larger than tiles and splits, also such that divide neither."""
    layout = make_layout([(1, 41), (6, 35)], block_size=block_size)
    check(make_scene(layout, Geometry()))


def test_strided_queries_and_pools() -> None:
    """Queries as transformers hands them over, and a pool that is a slice of a larger tensor."""
    scene = make_scene(mixed_layout(), Geometry(query_head_count=4, kv_head_count=2))
    query = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    keys = torch.cat([scene.layer.keys, scene.layer.values], dim=1)[:, :2]
    check(replace(scene, query=query, layer=LayerKv(keys, scene.layer.values)))


def test_static_buffers_with_room_to_spare() -> None:
    """Padding in larger buffers does nothing, also where a larger pass stood before."""
    large = make_layout([(40, 71)], block_size=8)
    tables = np.concatenate([large.block_tables, large.block_tables[:, ::-1]])
    small = PassLayout(
        tables,
        np.array([0, 30]),
        np.array([1, 10]),
        np.array([5, 21]),
        row_count=40,
        block_size=8,
        block_count=large.block_count,
    )
    capacity = WorkCapacity(
        rows=40,
        sequences=3,
        blocks_per_sequence=12,
        narrow_items=2,
        wide_items=2,
        whole_items=5,
        listed_rows=50,
        partials=4,
        reductions=43,
    )
    buffers = WorkBuffers(
        capacity,
        block_size=8,
        block_count=large.block_count,
        sizes=SIZES,
        device=CPU,
    )
    for layout in (large, small):
        scene = make_scene(layout, Geometry())
        tensors = buffers.load(layout, work_of(scene, PLAIN, long_query_row_count=8))
        guarded = torch.full((43, 2, 16), 7.0)
        launches = attention.attention_launches(
            scene.query, scene.layer, tensors, PLAIN, TILING, output=guarded[:40]
        )
        for launch in launches:
            launch.run()
        expected = exact_answer(scene, PLAIN).float()
        torch.testing.assert_close(guarded[:40], expected, atol=1e-5, rtol=1e-5)
        assert (guarded[40:] == 7.0).all()


def test_a_pass_too_large_for_its_buffers_is_refused() -> None:
    """The error names what does not fit; the buffers keep what they held."""
    small = make_layout([(1, 8)], block_size=8)
    large = make_layout([(1, 8), (1, 8)], block_size=8)
    work = plan_work(small, SIZES)
    tensors_before = work_tensors(small, work, device=CPU)
    buffers = WorkBuffers(
        capacity_of(small, work),
        block_size=8,
        block_count=large.block_count,
        sizes=SIZES,
        device=CPU,
    )
    small = replace(small, block_count=large.block_count)
    buffers.load(small, work)
    with pytest.raises(WorkTooLarge) as caught:
        buffers.load(large, plan_work(large, SIZES))
    assert ("rows", 2, 1) == (caught.value.name, caught.value.needed, caught.value.capacity)
    assert torch.equal(tensors_before.block_tables, buffers.tensors.block_tables)


def test_a_row_does_not_depend_on_who_shares_its_splits() -> None:
    """Decode alone and decode in a group give the same bits as long as the tile is the same."""
    together = make_scene(mixed_layout(), Geometry())
    work = work_of(together, PLAIN, long_query_row_count=256)
    assert (work.narrow_items[:, 4] == 2).any(), "two rows share a split"
    tensors = work_tensors(together.layout, work, device=CPU)
    answers = attention.paged_attention(together.query, together.layer, tensors, PLAIN, TILING)
    for index in range(2):
        alone = PassLayout(
            together.layout.block_tables[index : index + 1],
            together.layout.query_starts[:1],
            together.layout.query_token_counts[:1],
            together.layout.context_token_counts[index : index + 1],
            1,
            8,
            together.layout.block_count,
        )
        scene = Scene(alone, together.layer, together.query[index : index + 1])
        tensors = work_tensors(alone, work_of(scene, PLAIN, long_query_row_count=256), device=CPU)
        answer = attention.paged_attention(scene.query, scene.layer, tensors, PLAIN, TILING)
        assert torch.equal(answers[index], answer[0])


@pytest.mark.parametrize(
    ("options", "tiling", "changes"),
    [
        (replace(PLAIN, window_token_count=8), TILING, {}),
        (replace(PLAIN, softcap=-1.0), TILING, {}),
        (replace(PLAIN, sinks=torch.zeros(3)), TILING, {}),
        (PLAIN, replace(TILING, narrow=TILING.wide), {}),
        (PLAIN, TILING, {"query": torch.zeros(11, 2, 24)}),
        (PLAIN, TILING, {"query": torch.zeros(11, 2, 16).half()}),
        (PLAIN, TILING, {"query": torch.zeros(12, 2, 16)}),
    ],
    ids=["window", "softcap", "sinks", "tiling", "width", "dtype", "rows"],
)
def test_wrong_arguments_are_refused(
    options: AttentionOptions, tiling: Tiling, changes: dict[str, Tensor]
) -> None:
    """What does not fit the layer or the work list is found before anything is launched."""
    scene = make_scene(mixed_layout(), Geometry())
    work = work_of(scene, PLAIN, long_query_row_count=256)
    tensors = work_tensors(scene.layout, work, device=CPU)
    scene = replace(scene, **changes)
    with pytest.raises(AssertionError):
        attention.paged_attention(scene.query, scene.layer, tensors, options, tiling)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_every_combination(
    width: int, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None
) -> None:
    """Every head width, dtype, block size and KV format, with all options."""
    layout = make_layout([(1, 70), (1, 69), (9, 50)], block_size=block_size)
    options = AttentionOptions(width**-0.5, 40, 20.0, torch.randn(4))
    scene = make_scene(layout, Geometry(4, 2, width, width, dtype, kv_dtype))
    check(scene, options, long_query_row_count=8)
    check(scene, AttentionOptions(width**-0.5))
