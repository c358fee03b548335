"""Decode rows together: every row reads its context once, and what rows share is read once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cascade import WithoutCascade
from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.attention.cascade import Branch, DecodeCascade, build_cascade
from prefixd.worker.attention.reference import ReferenceBackend
from prefixd.worker.attention.sdpa import SdpaBackend
from prefixd.worker.attention.seam import LayerTraits
from prefixd.worker.model.forward import flatten
from prefixd.worker.model.runner import ModelRunner
from tests.support.backends import build_batch
from tests.support.models import (
    CPU,
    PagedHarness,
    in_one_group,
    llama_config,
    random_model,
    random_tokens,
)

BLOCK_COUNT = 64


def twig_slots(cascade: DecodeCascade, place: int) -> list[int]:
    """The slots that a row reads alone in its twig, padding left out."""
    slots = cascade.twigs.slots.view(-1, cascade.twigs.length)[place]
    return slots[~cascade.twigs.is_padding[place]].tolist()


def slots_of(branch: Branch) -> list[int]:
    """The slots that a branch reads, in order of position."""
    slots = branch.stretch.slots
    if isinstance(slots, slice):
        return list(range(slots.start, slots.stop))
    return slots.tolist()


def decode_rows(tables: list[list[int]], contexts: list[int]) -> list[SequenceRows]:
    """One query row per table."""
    return [
        SequenceRows(index, 1, context, tuple(table))
        for index, (table, context) in enumerate(zip(tables, contexts, strict=True))
    ]


@st.composite
def forests(draw: st.DrawFn) -> tuple[int, list[SequenceRows]]:
    """A block size, and sequences whose tables begin with prefixes of earlier ones' tables."""
    block_size = draw(st.sampled_from([1, 4, 16, 64]))
    fresh = iter(draw(st.permutations(range(1, BLOCK_COUNT))))
    tables: list[list[int]] = []
    contexts: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        prefix: list[int] = []
        if tables and draw(st.booleans()):
            index = draw(st.integers(0, len(tables) - 1))
            full_count = contexts[index] // block_size
            prefix = tables[index][: draw(st.integers(0, full_count))]
        own = [next(fresh) for _ in range(draw(st.integers(1, 8)))]
        if draw(st.booleans()):
            own.sort()  # makes consecutive runs likelier
        table = prefix + own
        last = draw(st.integers(1, block_size))
        tables.append(table)
        contexts.append((len(table) - 1) * block_size + last)
    return block_size, decode_rows(tables, contexts)


@settings(max_examples=100)
@given(forests())
def test_branches_give_each_row_its_context_once(forest: tuple[int, list[SequenceRows]]) -> None:
    """Every position of every row, at the slot that its table says: branches first, then twigs."""
    block_size, sequences = forest
    cascade = build_cascade(sequences, block_size=block_size, device=CPU)
    assert sorted(cascade.rows.tolist()) == list(range(len(sequences)))
    for place, row in enumerate(cascade.rows.tolist()):
        seen: dict[int, int] = {}
        for branch in cascade.branches:
            if branch.first_row <= place < branch.end_row:
                positions = range(branch.stretch.first_position, branch.stretch.end_position)
                assert not seen.keys() & set(positions)
                seen.update(zip(positions, slots_of(branch), strict=True))
        rows = sequences[row]
        expected = [
            rows.block_ids[position // block_size] * block_size + position % block_size
            for position in range(rows.context_token_count)
        ]
        branch_end = len(seen)
        assert list(range(branch_end)) == sorted(seen)
        actual = [seen[position] for position in range(branch_end)] + twig_slots(cascade, place)
        assert expected == actual


@settings(max_examples=100)
@given(forests())
def test_no_slot_is_read_twice(forest: tuple[int, list[SequenceRows]]) -> None:
    """Shared blocks are read once, however many rows share them and however deep."""
    block_size, sequences = forest
    cascade = build_cascade(sequences, block_size=block_size, device=CPU)
    reads = Counter(slot for branch in cascade.branches for slot in slots_of(branch))
    reads.update(slot for place in range(len(sequences)) for slot in twig_slots(cascade, place))
    assert {1} == set(reads.values())


@settings(max_examples=50)
@given(forests(), st.sampled_from([None, 2.0]), st.booleans())
def test_cascade_equals_reference(
    forest: tuple[int, list[SequenceRows]], softcap: float | None, has_sinks: bool
) -> None:
    """The numbers, with grouped heads, soft caps and sinks."""
    block_size, sequences = forest
    generator = torch.Generator().manual_seed(block_size)
    query = torch.randn(len(sequences), 6, 8, generator=generator)
    keys, values = torch.randn(2, BLOCK_COUNT * block_size, 2, 8, generator=generator)
    sinks = torch.randn(6, generator=generator) if has_sinks else None
    traits = LayerTraits(scaling=0.5, softcap=softcap, sinks=sinks)
    slots = torch.zeros(len(sequences), dtype=torch.int64)
    batch = build_batch(slots, sequences, block_size=block_size)
    expected = ReferenceBackend().plan(batch).attend(query, LayerKv(keys, values), traits)
    actual = SdpaBackend().plan(batch).attend(query, LayerKv(keys, values), traits)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_shared_run_is_one_view_of_the_pool() -> None:
    """Three rows on one document of consecutive blocks: one slice for all, nothing gathered."""
    document = list(range(10, 30))
    tables = [[*document, 40], [*document, 35, 41], [*document, 50]]
    cascade = build_cascade(decode_rows(tables, [330, 350, 321]), block_size=16, device=CPU)
    shared = [branch for branch in cascade.branches if branch.end_row - branch.first_row == 3]
    assert [slice(160, 480)] == [branch.stretch.slots for branch in shared]


@pytest.mark.parametrize("run_block_count", [3, 4])
def test_short_runs_are_gathered_together(run_block_count: int) -> None:
    """A run of 64 tokens is read in place, shorter neighbours share one gather."""
    run = list(range(20, 20 + run_block_count))
    table = [9, 3, *run, 7, 5]
    sequences = decode_rows([table, table], [16 * len(table), 16 * len(table)])
    cascade = build_cascade(sequences, block_size=16, device=CPU)
    kinds = [type(branch.stretch.slots) for branch in cascade.branches]
    expected = {3: [torch.Tensor], 4: [torch.Tensor, slice, torch.Tensor]}
    assert expected[run_block_count] == kinds


@pytest.mark.parametrize(("token_count", "is_branch"), [(256, False), (257, True)])
def test_long_ends_are_branches_of_their_own(token_count: int, *, is_branch: bool) -> None:
    """One long end must not make every row's padding long."""
    shared = list(range(1, 5))
    tables = [[*shared, 40], [*shared, *range(10, 27)]]
    contexts = [64 + 3, 64 + token_count]
    cascade = build_cascade(decode_rows(tables, contexts), block_size=16, device=CPU)
    expected = [slice(16, 80)] + [slice(160, 160 + token_count)] * is_branch
    assert expected == [branch.stretch.slots for branch in cascade.branches]
    assert cascade.twigs.length == (3 if is_branch else token_count)


def test_rows_that_end_with_a_shared_block_have_no_twig() -> None:
    """Nothing is left to pad, and nothing goes wrong for it."""
    tables = [[3, 4], [3, 4]]
    sequences = decode_rows(tables, [32, 32])
    cascade = build_cascade(sequences, block_size=16, device=CPU)
    assert cascade.twigs.length == 0
    query = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1))
    layer = LayerKv(*torch.randn(2, 96, 2, 8, generator=torch.Generator().manual_seed(2)))
    batch = build_batch(torch.zeros(2, dtype=torch.int64), sequences, block_size=16)
    traits = LayerTraits(scaling=0.5)
    expected = ReferenceBackend().plan(batch).attend(query, layer, traits)
    torch.testing.assert_close(cascade.attend(query, layer, traits), expected, atol=1e-5, rtol=1e-5)


def test_whole_decode_steps_agree_with_and_without_cascade() -> None:
    """Sixteen sequences on one long prefix, their own ends of different lengths."""
    model = in_one_group(random_model(llama_config()))
    harness = PagedHarness(model, backend="torch", block_count=96)
    shared = random_tokens(10 * 16, below=160, seed=1)
    prompts = [
        shared + random_tokens(1 + 3 * sequence, below=160, seed=2 + sequence)
        for sequence in range(16)
    ]
    tables = [(*range(1, 11), *range(11 + 4 * s, 15 + 4 * s)) for s in range(16)]
    harness.run(harness.chunk(shared, tables[0], 0, len(shared)))
    steps = []
    for token_ids, table in zip(prompts, tables, strict=True):
        last = len(token_ids) - 1
        if last > len(shared):
            harness.run(harness.chunk(token_ids, table, len(shared), last))
        steps.append(harness.chunk(token_ids, table, last, last + 1))
    with_cascade = torch.cat(harness.run(*steps))
    without = ModelRunner(model, harness.kv, WithoutCascade()).run(flatten(steps))
    scale = float(without.abs().max())
    torch.testing.assert_close(with_cascade, without, atol=1e-5 * scale, rtol=0.0)
