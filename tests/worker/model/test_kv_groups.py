"""Models with windows in some layers: each KV group has tables of its own (S23).

The tables come from a stand-in for the controller that frees what windows leave behind at once, and
whatever is free holds NaN: a row that reads it shows.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixd.worker.kv_groups import KvGroup, group_layers
from prefixd.worker.model.forward import Chunk
from prefixd.worker.model.loaded import LoadedModel
from tests.support.backends import every_backend
from tests.support.models import (
    PagedHarness,
    eager_logits,
    eager_twin,
    mixed_config,
    random_model,
    random_tokens,
)

DIFFERENCE_MAX = 2e-4
BLOCK_SIZE = 4
WINDOW = 20
TOKEN_COUNT = 110
SHARED_TOKEN_COUNT = 48


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None, None, None), [(None, (0, 1, 2))]),
        ((7, 7), [(None, (0, 1))]),
        ((7, 9), [(None, (0, 1))]),
        ((7, None), [(None, (1,)), (7, (0,))]),
        ((7, 7, None, 7, 7, None), [(None, (2, 5)), (7, (0, 1)), (7, (3, 4))]),
        ((7, 7, 7, None, None), [(None, (3, 4)), (7, (0, 1)), (7, (2,))]),
        ((9, None, 7, 9), [(None, (1,)), (7, (2,)), (9, (0,)), (9, (3,))]),
        ((7,) * 64 + (None,), [(None, tuple(range(65)))]),
    ],
)
def test_s23_layers_of_one_kind_form_groups(
    windows: tuple[int | None, ...], expected: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    """S23: full attention first; models of windows alone keep every block."""
    groups = group_layers(windows, ["page"] * len(windows))
    assert groups == tuple(KvGroup(window, layers) for window, layers in expected)


def test_s23_layers_of_unequal_pages_stay_one_group() -> None:
    """S23: a block id could not name one page whichever group owned it."""
    assert group_layers((7, None), ["page", "other"]) == (KvGroup(None, (0, 1)),)


def test_s23_window_as_long_as_the_context_is_none() -> None:
    """S23: a layer that never hides anything is one of full attention."""
    model = random_model(mixed_config(sliding_window=512, max_position_embeddings=512))
    assert model.groups == (KvGroup(None, tuple(range(8))),)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (19, 0), (22, 0), (23, 1), (110, 22)])
def test_s23_first_read_block(position: int, first: int) -> None:
    """S23: block i may go once all its positions lie left of the window."""
    assert KvGroup(WINDOW).first_read_block(position, block_size=BLOCK_SIZE) == first
    assert KvGroup().first_read_block(position, block_size=BLOCK_SIZE) == 0


class Blocks:
    """Who holds what: free blocks are handed out in random order, those let go last of all."""

    def __init__(self, harness: PagedHarness) -> None:
        self.harness = harness
        self.holders: Counter[int] = Counter()
        self.free = list(range(1, harness.kv.block_count))
        random.Random(3).shuffle(self.free)

    def take(self) -> int:
        """A free block."""
        block_id = self.free.pop()
        self.holders[block_id] = 1
        return block_id

    def let_go(self, block_id: int) -> None:
        """A holder less; behind the last one the block is spoiled."""
        self.holders[block_id] -= 1
        if not self.holders[block_id]:
            spoil(self.harness, block_id)
            self.free.insert(0, block_id)


class Tables:
    """One sequence's tables."""

    def __init__(self, blocks: Blocks, token_ids: list[int]) -> None:
        self.blocks = blocks
        self.harness = blocks.harness
        self.token_ids = token_ids
        self.tables: list[list[int]] = [[] for _ in self.harness.model.groups]

    def share(self, other: Tables, token_count: int) -> None:
        """Begins with the blocks that another one holds of its first tokens, as a match would."""
        for group, table, theirs in zip(
            self.harness.model.groups, self.tables, other.tables, strict=True
        ):
            first = group.first_read_block(token_count, block_size=BLOCK_SIZE)
            shared = theirs[first : token_count // BLOCK_SIZE]
            assert 0 not in shared
            self.blocks.holders.update(shared)
            table.extend([0] * first + shared)

    def chunk(self, start: int, end: int) -> Chunk:
        """The next chunk: windows let go first, then blocks are taken."""
        for group, table in zip(self.harness.model.groups, self.tables, strict=True):
            for index in range(group.first_read_block(start, block_size=BLOCK_SIZE)):
                if table[index]:
                    self.blocks.let_go(table[index])
                table[index] = 0
            while len(table) * BLOCK_SIZE < end:
                table.append(self.blocks.take())
        tables = [tuple(table) for table in self.tables]
        return self.harness.chunk_of_groups(self.token_ids, tables, start, end)

    @property
    def held_block_counts(self) -> list[int]:
        """Blocks held in each group."""
        return [sum(block_id != 0 for block_id in table) for table in self.tables]


def spoil(harness: PagedHarness, *block_ids: int) -> None:
    """Fills blocks with NaN."""
    for page in range(harness.kv.page_count):
        for block_id in block_ids:
            slots = slice(block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE)
            harness.kv.layer(page).keys[slots] = torch.nan
            harness.kv.layer(page).values[slots] = torch.nan


class Subject:
    """The model, its eager twin, and two prompts with a common beginning longer than the window."""

    def __init__(self) -> None:
        self.model: LoadedModel = random_model(mixed_config())
        twin: Any = eager_twin(self.model)
        self.first = random_tokens(TOKEN_COUNT, below=self.model.vocabulary_size, seed=1)
        rest = random_tokens(40, below=self.model.vocabulary_size, seed=2)
        self.second = self.first[:SHARED_TOKEN_COUNT] + rest
        self.first_logits = eager_logits(twin, self.first)
        self.second_logits = eager_logits(twin, self.second)

    def sequences(self, backend: str, *, block_count: int = 400) -> tuple[Tables, Tables]:
        """Both prompts on a fresh pool, all of it spoiled."""
        harness = PagedHarness(
            self.model, backend=backend, block_count=block_count, block_size=BLOCK_SIZE
        )
        spoil(harness, *range(block_count))
        blocks = Blocks(harness)
        return Tables(blocks, self.first), Tables(blocks, self.second)


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Made once."""
    return Subject()


def run(*parts: tuple[Tables, int, int]) -> list[Tensor]:
    """One pass over a chunk of each sequence; block 0 is spoiled before."""
    harness = parts[0][0].harness
    chunks = [tables.chunk(start, end) for tables, start, end in parts]
    spoil(harness, 0)
    return harness.run(*chunks)


def run_in_chunks(tables: Tables, borders: list[int]) -> Tensor:
    """The sequence alone, chunk by chunk."""
    return torch.cat([run((tables, start, end))[0] for start, end in pairwise(borders)])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares logits, and that there is something to compare."""
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, atol=DIFFERENCE_MAX, rtol=0.0)


def test_s23_page_memories_are_those_of_one_group(subject: Subject) -> None:
    """S23: eight layers in four groups of two; the pool has two page memories."""
    assert [g.window_token_count for g in subject.model.groups] == [None, WINDOW, WINDOW, WINDOW]
    tables, _ = subject.sequences("torch", block_count=4)
    assert tables.harness.kv.page_count == 2
    assert tables.harness.kv.byte_count == 4 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("backend", every_backend())
def test_s23_cold_prefill_equals_transformers(subject: Subject, backend: str) -> None:
    """S23: a prompt of several windows in one pass."""
    tables, _ = subject.sequences(backend)
    assert_close(run((tables, 0, TOKEN_COUNT))[0], subject.first_logits)


@pytest.mark.parametrize("backend", every_backend())
def test_s23_chunks_and_rows_equal_transformers(subject: Subject, backend: str) -> None:
    """S23: blocks left behind are gone before each chunk; borders fall inside blocks."""
    tables, _ = subject.sequences(backend)
    borders = [0, 5, 37, 38, 71, *range(96, TOKEN_COUNT + 1)]
    assert_close(run_in_chunks(tables, borders), subject.first_logits)


@pytest.mark.parametrize("backend", every_backend())
def test_s23_cached_prefix_equals_transformers(subject: Subject, backend: str) -> None:
    """S23: of a match, a window group holds the blocks of its last window only."""
    first, second = subject.sequences(backend)
    run((first, 0, SHARED_TOKEN_COUNT))
    second.share(first, SHARED_TOKEN_COUNT)
    end = len(subject.second)
    assert_close(run((second, SHARED_TOKEN_COUNT, end))[0], subject.second_logits[-40:])


@pytest.mark.parametrize("backend", every_backend())
def test_s23_batched_sequences_equal_transformers(subject: Subject, backend: str) -> None:
    """S23: a writer, a reader of what it writes in that very pass, and then rows side by side."""
    first, second = subject.sequences(backend)
    chunk = first.chunk(0, SHARED_TOKEN_COUNT)
    second.share(first, SHARED_TOKEN_COUNT)
    reader = second.chunk(SHARED_TOKEN_COUNT, 84)
    spoil(first.harness, 0)
    writer_logits, reader_logits = first.harness.run(chunk, reader)
    assert_close(writer_logits, subject.first_logits[:SHARED_TOKEN_COUNT])
    assert_close(reader_logits, subject.second_logits[SHARED_TOKEN_COUNT:84])
    for step in range(4):
        position, beside = SHARED_TOKEN_COUNT + step, 84 + step
        rows = run((first, position, position + 1), (second, beside, beside + 1))
        assert_close(rows[0][0], subject.first_logits[position])
        assert_close(rows[1][0], subject.second_logits[beside])


def test_s23_strict_results_are_the_same_bits(subject: Subject) -> None:
    """S23: a cold pass, chunks with blocks freed in between, and a prefix hit."""
    first, _ = subject.sequences("strict")
    cold = run((first, 0, TOKEN_COUNT))[0].clone()
    chunked, _ = subject.sequences("strict")
    assert torch.equal(run_in_chunks(chunked, [0, 9, 64, 65, 100, 101, TOKEN_COUNT]), cold)

    writer, second = subject.sequences("strict")
    cold_second = run((second, 0, len(subject.second)))[0].clone()
    hit = Tables(writer.blocks, subject.second)
    run((writer, 0, SHARED_TOKEN_COUNT))
    hit.share(writer, SHARED_TOKEN_COUNT)
    logits = run((hit, SHARED_TOKEN_COUNT, len(subject.second)))[0]
    assert torch.equal(logits, cold_second[SHARED_TOKEN_COUNT:])


def test_s23_long_decode_holds_a_bounded_number_of_window_blocks(subject: Subject) -> None:
    """S23: window groups stay at one window, one group of full attention grows."""
    tables, _ = subject.sequences("torch", block_count=60)
    run_in_chunks(tables, [0, *range(40, TOKEN_COUNT + 1)])
    full, *windows = tables.held_block_counts
    assert full == -(-TOKEN_COUNT // BLOCK_SIZE)
    assert max(windows) <= -(-WINDOW // BLOCK_SIZE) + 1


def test_s23_pass_that_reads_a_freed_block_is_refused(subject: Subject) -> None:
    """S23: block 0 may stand left of the window, and nowhere else."""
    tables, _ = subject.sequences("torch")
    run((tables, 0, 60))
    chunk = tables.chunk(60, 61)
    first = KvGroup(WINDOW).first_read_block(60, block_size=BLOCK_SIZE)
    spoiled = [list(table) for table in chunk.tables]
    spoiled[1][first] = 0
    broken = tables.harness.chunk_of_groups(subject.first, spoiled, 60, 61)
    with pytest.raises(AssertionError, match="block ids lie in the pool"):
        tables.harness.run(broken)
