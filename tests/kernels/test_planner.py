from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixd.kernels.oracle import make_layout
from prefixd.kernels.planner import Planner, plan_work
from prefixd.kernels.work_buffers import capacity_of, decode_capacity
from prefixd.kernels.work_list import BlockIdOutOfRange, PassLayout, PlanSizes, WorkList

SIZES = PlanSizes(4, 16, 8, split_token_count=32)


def read_pairs(layout: PassLayout, work: WorkList, sizes: PlanSizes) -> list[tuple[int, int, int]]:
    """Every (row, position, block) that the work list leads a program to, in any order."""
    pairs = []
    positions = layout.positions()
    for items in (work.narrow_items, work.wide_items, work.whole_items):
        for table_row, first, end, row_start, row_count in items.tolist():
            for row in work.rows[row_start : row_start + row_count].tolist():
                position = int(positions[row])
                window = sizes.window_token_count
                start = first if window is None else max(first, position - window + 1)
                for key in range(start, min(end, position + 1)):
                    block = int(layout.block_tables[table_row, key // layout.block_size])
                    pairs.append((row, key, block))
    return sorted(pairs)


def wanted_pairs(layout: PassLayout, sizes: PlanSizes) -> list[tuple[int, int, int]]:
    """Every (row, position, block) that attention is about, by the block tables."""
    pairs = []
    for index, query_start in enumerate(layout.query_starts.tolist()):
        for rank in range(int(layout.query_token_counts[index])):
            position = int(layout.start_positions[index]) + rank
            window = sizes.window_token_count
            first = 0 if window is None else max(0, position - window + 1)
            for key in range(first, position + 1):
                block = int(layout.block_tables[index, key // layout.block_size])
                pairs.append((query_start + rank, key, block))
    return sorted(pairs)


def check_reductions(layout: PassLayout, work: WorkList) -> None:
    """A split row adds up its own partials by position, a padding row none, a whole row nothing."""
    firsts = np.full(len(work.rows), -1)
    for items in (work.narrow_items, work.wide_items):
        for item in items.tolist():
            firsts[item[3] : item[3] + item[4]] = item[1]
    added = []
    for row, start, end in work.reductions.tolist():
        partials = work.partial_order[start:end].tolist()
        assert [row] * len(partials) == work.rows[partials].tolist()
        splits = firsts[partials].tolist()
        assert sorted(set(splits)) == splits
        added += partials
    assert list(range(work.partial_count)) == sorted(added)
    whole = set(work.rows[work.partial_count :].tolist())
    assert set(range(layout.row_count)) - whole == set(work.reductions[:, 0].tolist())


@st.composite
def layouts(draw: st.DrawFn) -> PassLayout:
    """Up to five sequences, some with a common prefix, over small blocks."""
    queries = draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 150)), min_size=1, max_size=5)
    )
    block_size = draw(st.sampled_from([1, 3, 8, 16, 64]))
    contexts = [(query, query + before) for query, before in queries]
    counts = [-(-context // block_size) for _, context in contexts]
    shared = [draw(st.integers(0, min(left, right))) for left, right in itertools.pairwise(counts)]
    padding = draw(st.integers(0, 3))
    return make_layout(
        contexts, block_size=block_size, shared_block_counts=shared, padding_row_count=padding
    )


@settings(max_examples=60)
@given(
    layout=layouts(),
    window=st.none() | st.integers(1, 200),
    long_query_row_count=st.sampled_from([1, 8, 1000]),
    narrow_row_count=st.sampled_from([1, 4, 16]),
)
def test_every_row_reads_what_it_sees_once(
    layout: PassLayout, window: int | None, long_query_row_count: int, narrow_row_count: int
) -> None:
    """Whatever the tables share: each (row, position) is read once, from the row's own block."""
    sizes = PlanSizes(narrow_row_count, 16, 8, 32, window, long_query_row_count)
    work = plan_work(layout, sizes)
    assert wanted_pairs(layout, sizes) == read_pairs(layout, work, sizes)
    check_reductions(layout, work)
    for items, row_count_max in (
        (work.narrow_items, narrow_row_count),
        (work.wide_items, 16),
        (work.whole_items, 8),
    ):
        assert (items[:, 4] >= 1).all()
        assert (items[:, 4] <= row_count_max).all()


def test_equal_splits_are_read_once() -> None:
    """64 decodes over one prefix of 4 splits: its splits are read in tiles of 16 rows."""
    layout = make_layout([(1, 4 * 32 + 5)] * 64, block_size=8, shared_block_counts=[4 * 4] * 63)
    work = plan_work(layout, SIZES)
    assert 4 * (64 // 16) == len(work.wide_items)
    assert 64 == len(work.narrow_items)


def test_a_tree_is_read_by_branches() -> None:
    """Two prefixes of 2 splits below a common one: 1 + 2 items beside the private ends."""
    layout = make_layout([(1, 3 * 32 + 1)] * 4, block_size=8, shared_block_counts=[12, 4, 12])
    items = plan_work(layout, SIZES).narrow_items
    assert [4, 2, 2, 2, 2] == sorted(items[items[:, 2] < 128][:, 4].tolist(), reverse=True)


def test_tables_that_only_look_equal_are_read_apart() -> None:
    """Same last block, another block before it: such a table never comes from a prefix tree."""
    layout = make_layout([(1, 33)] * 3, block_size=8, shared_block_counts=[4, 4])
    layout.block_tables[1, 1] = layout.block_count - 1
    work = plan_work(layout, SIZES)
    assert wanted_pairs(layout, SIZES) == read_pairs(layout, work, SIZES)
    assert [2, 1] == work.narrow_items[work.narrow_items[:, 2] == 32][:, 4].tolist()


def decoded(layout: PassLayout, token_count: int) -> PassLayout:
    """The layout some decode steps later, in tables that already have the blocks."""
    return replace(layout, context_token_counts=layout.context_token_counts + token_count)


def shared_decodes(context_token_count: int) -> PassLayout:
    """Three decodes over one prefix of 32 tokens, in tables with room for 96."""
    layout = make_layout([(1, 96)] * 3, block_size=8, shared_block_counts=[4, 4])
    return replace(layout, context_token_counts=np.full(3, context_token_count))


def test_a_plan_is_reused_while_nothing_moved() -> None:
    """Within a split, decode steps and appended blocks leave the work list what it is."""
    planner = Planner(SIZES)
    layout = shared_decodes(40)
    work = planner.plan(layout)
    later = decoded(layout, 9)
    assert work is planner.plan(later)
    assert wanted_pairs(later, SIZES) == read_pairs(later, work, SIZES)
    grown = replace(later, block_tables=layout.block_tables.copy())
    grown.block_tables[:, 6] = layout.block_count - 1
    assert work is planner.plan(grown)


@pytest.mark.parametrize("window", [None, 20])
def test_a_plan_is_made_anew_when_something_moved(window: int | None) -> None:
    """A new split, a moved shared block, another row: each gives another list, and a right one."""
    sizes = replace(SIZES, window_token_count=window)
    layout = shared_decodes(40)
    moved = replace(layout, block_tables=layout.block_tables.copy())
    moved.block_tables[1, 2] = layout.block_count - 1
    wider = replace(layout, row_count=4)
    for changed in (decoded(layout, 25), moved, wider):
        planner = Planner(sizes)
        work = planner.plan(layout)
        again = planner.plan(changed)
        assert work is not again
        assert wanted_pairs(changed, sizes) == read_pairs(changed, again, sizes)
        check_reductions(changed, again)


def test_a_table_written_in_place_is_noticed() -> None:
    """The planner keeps what it compares with: its caller may reuse the table's memory."""
    planner = Planner(SIZES)
    layout = shared_decodes(40)
    work = planner.plan(layout)
    layout.block_tables[1, 2] = layout.block_count - 1
    assert work is not planner.plan(layout)


def test_a_window_that_left_a_split_makes_a_new_plan() -> None:
    """Once no row sees a split, it is not read any more."""
    sizes = replace(SIZES, window_token_count=9)
    planner = Planner(sizes)
    layout = shared_decodes(40)
    work = planner.plan(layout)
    later = decoded(layout, 1)
    again = planner.plan(later)
    assert work is not again
    assert wanted_pairs(later, sizes) == read_pairs(later, again, sizes)
    assert len(again.rows) < len(work.rows)


def test_a_pass_of_padding_alone() -> None:
    """No sequence at all: every row becomes zero."""
    empty = np.zeros(0, np.int64)
    layout = PassLayout(np.zeros((0, 0), np.int32), empty, empty, empty, 3, 8, 2)
    work = plan_work(layout, SIZES)
    assert [[0, 0, 0], [1, 0, 0], [2, 0, 0]] == work.reductions.tolist()
    assert not len(work.rows)


@pytest.mark.parametrize("block_id", [-1, 9])
def test_block_ids_outside_the_pool_are_refused(block_id: int) -> None:
    """Kernels do not check block ids, so a layout does."""
    empty = np.ones(1, np.int64)
    with pytest.raises(BlockIdOutOfRange) as caught:
        PassLayout(np.array([[block_id]], np.int32), empty - 1, empty, empty, 1, 8, 9)
    assert (block_id, 9) == (caught.value.block_id, caught.value.block_count)


@settings(max_examples=60)
@given(
    contexts=st.lists(st.integers(1, 160), min_size=1, max_size=12),
    shared=st.integers(0, 20),
    window=st.none() | st.integers(1, 200),
    row_counts=st.sampled_from([(1, 16), (4, 16), (16, 16), (4, 4), (1, 1)]),
)
@example(contexts=[160] * 4, shared=20, window=None, row_counts=(4, 4))
@example(contexts=[160], shared=0, window=None, row_counts=(1, 1))
def test_every_decode_fits_in_the_decode_capacity(
    contexts: list[int], shared: int, window: int | None, row_counts: tuple[int, int]
) -> None:
    """Buffers sized once for a number of sequences serve whatever these share.

    Narrow and wide tiles are as large as one another in float32, and with many heads per kv head.
    """
    counts = [-(-context // 8) for context in contexts]
    shared_counts = [min(shared, *pair) for pair in itertools.pairwise(counts)]
    layout = make_layout(
        [(1, context) for context in contexts], block_size=8, shared_block_counts=shared_counts
    )
    sizes = PlanSizes(*row_counts, 8, 32, window)
    capacity = decode_capacity(
        sizes, sequence_count=len(contexts), blocks_per_sequence=20, block_size=8
    )
    needed = capacity_of(layout, plan_work(layout, sizes))
    for field in fields(needed):
        assert getattr(needed, field.name) <= getattr(capacity, field.name), field.name
