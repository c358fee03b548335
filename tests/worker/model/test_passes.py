"""Steps split into passes: rows of decode apart, and nothing read before it is written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixd.worker.model.forward import Chunk
from prefixd.worker.model.passes import PassSplit, split_passes

BLOCK_SIZE = 4


def chunk(start: int, end: int, *tables: tuple[int, ...], lora_name: str = "") -> Chunk:
    """Positions [start, end) of a sequence with a block table for each KV group."""
    slots = [
        [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        for t in tables
    ]
    return Chunk([0] * (end - start), start, tables, slots, 1, lora_name)


def test_prompts_go_first_and_rows_together() -> None:
    """Where nothing is shared, every chunk of one token is a row of the second pass."""
    chunks = [
        chunk(3, 4, (1,)),
        chunk(0, 6, (2, 3)),
        chunk(0, 1, (4,)),
        chunk(5, 6, (5, 6), lora_name="one"),
    ]
    assert split_passes(chunks, block_size=BLOCK_SIZE) == PassSplit(mixed=(1, 3), decode=(0, 2))


def test_s10_a_row_joins_what_a_prompt_of_its_step_writes() -> None:
    """S10: a prompt of which one token is left to compute reads what the first pass wrote."""
    chunks = [chunk(0, 8, (1, 2)), chunk(8, 9, (1, 2, 3))]
    assert split_passes(chunks, block_size=BLOCK_SIZE) == PassSplit(mixed=(0,), decode=(1,))


def test_s10_a_prompt_joins_a_block_that_a_row_of_its_step_completes() -> None:
    """S10: the row that writes the block's last slot goes with the prompt; the others stay."""
    chunks = [chunk(3, 4, (1,)), chunk(3, 4, (7,)), chunk(4, 6, (1, 2))]
    assert split_passes(chunks, block_size=BLOCK_SIZE) == PassSplit(mixed=(0, 2), decode=(1,))


def test_s10_rows_that_join_one_another_follow_one_another() -> None:
    """S10: a row whose block a moved row reads moves, too, even out of the prompt's own sight."""
    chunks = [
        # Of a window group the prompt reads block 12 only, which the second row writes.
        chunk(3, 4, (1,), (11,)),
        chunk(4, 5, (1, 2), (11, 12)),
        chunk(5, 7, (3, 4), (0, 12)),
    ]
    assert split_passes(chunks, block_size=BLOCK_SIZE) == PassSplit(mixed=(0, 1, 2), decode=())


def test_a_step_of_rows_alone_is_one_pass() -> None:
    """Rows that share blocks with one another only are stored before any of them attends."""
    chunks = [chunk(3, 4, (1,)), chunk(4, 5, (1, 2))]
    assert split_passes(chunks, block_size=BLOCK_SIZE) == PassSplit(mixed=(), decode=(0, 1))


@st.composite
def steps(draw: st.DrawFn) -> list[Chunk]:
    """Chunks whose tables overlap at random, and whose slots are all distinct."""
    chunks: list[Chunk] = []
    written: set[int] = set()
    for _ in range(draw(st.integers(1, 7))):
        start = draw(st.integers(0, 10))
        end = start + draw(st.sampled_from((1, 1, 1, 2, 5)))
        count = -(-end // BLOCK_SIZE)
        table = tuple(draw(st.lists(st.integers(1, 12), min_size=count, max_size=count)))
        new = chunk(start, end, table, lora_name=draw(st.sampled_from(("", "", "", "one"))))
        if not written & set(new.slots[0]) and len(set(new.slots[0])) == end - start:
            written |= set(new.slots[0])
            chunks.append(new)
    return chunks or [chunk(0, 1, (1,))]


@given(steps())
def test_no_pass_reads_what_a_later_one_writes(chunks: list[Chunk]) -> None:
    """Every chunk is in one pass; rows of the second have one token and no adapter."""
    split = split_passes(chunks, block_size=BLOCK_SIZE)
    assert sorted(split.mixed + split.decode) == list(range(len(chunks)))
    read = {block for index in split.mixed for block in chunks[index].tables[0]}
    for index in split.decode:
        row = chunks[index]
        assert (len(row.token_ids), row.lora_name) == (1, "")
        assert row.slots[0][0] // BLOCK_SIZE not in read
    for index in split.mixed:
        # A row is moved only for somebody's sake.
        row = chunks[index]
        others = {b for other in split.mixed if other != index for b in chunks[other].tables[0]}
        is_row = len(row.token_ids) == 1 and not row.lora_name
        assert not is_row or row.slots[0][0] // BLOCK_SIZE in others
