"""Checks a forward pass against itself, its model and its pool before anything is written.

The controller promises all of it; a plan that breaks a promise must not reach other people's KV.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.model.forward import BlockCopy, ForwardPass, GroupRows
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel


def check_pass(
    forward: ForwardPass, tables: Sequence[NDArray[np.int32]], model: LoadedModel, kv: PagedKv
) -> None:
    """Asserts that a pass is right in itself and keeps to its own blocks.

    Args:
        forward: the pass.
        tables: the packed block tables of each KV group.
        model: that will run it.
        kv: the pool that it reads and writes.
    """
    count = forward.token_count
    assert count > 0, "a pass computes at least one token"
    assert forward.positions.shape == (count,), "one position per token"
    assert forward.token_ids.min() >= 0, "token ids are not negative"
    assert forward.token_ids.max() < model.vocabulary_size, "token id in vocabulary"
    assert forward.positions.max() < model.context_token_count_max, "within context"
    logit_rows = forward.logit_rows
    if len(logit_rows):
        assert 0 <= logit_rows.min() <= logit_rows.max() < count, "logit rows are rows"
    for group, rows, packed in zip(model.groups, forward.groups, tables, strict=True):
        assert rows.slots.shape == (count,), "one slot per token"
        _check_group(rows, forward.positions, packed, group, kv)
    slots = np.concatenate([rows.slots for rows in forward.groups])
    assert len(np.unique(slots)) == len(slots), "no slot is written twice"


def _check_group(
    rows: GroupRows,
    positions: NDArray[np.int64],
    tables: NDArray[np.int32],
    group: KvGroup,
    kv: PagedKv,
) -> None:
    """Tables cover their contexts with real blocks, and slots are those of the tables."""
    starts, counts, contexts, table_lengths = _columns(rows.sequences)
    assert counts.min(initial=1) > 0, "a sequence has at least one row"
    assert np.array_equal(starts, np.cumsum(counts) - counts), "rows follow one another"
    assert counts.sum() == len(positions), "every row belongs to a sequence"
    first_positions = contexts - counts
    assert first_positions.min(initial=0) >= 0, "positions are not negative"
    block_counts = -(-contexts // kv.block_size)
    for table_length, block_count in zip(table_lengths, block_counts, strict=True):
        assert table_length >= block_count, f"{table_length} blocks, {block_count} are read"
    # As unsigned numbers, negative ones are too large, too.
    assert tables.view(np.uint32).max(initial=0) < kv.block_count, "block ids lie in the pool"
    first_read = np.array(
        [group.first_read_block(int(p), block_size=kv.block_size) for p in first_positions],
        np.int64,
    )
    empty_rows, empty = np.nonzero(tables == 0)
    is_read = (empty >= first_read[empty_rows]) & (empty < block_counts[empty_rows])
    assert not is_read.any(), "block ids lie in the pool"
    sequences = np.repeat(np.arange(len(counts)), counts)
    expected_positions = np.arange(len(positions)) + (first_positions - starts)[sequences]
    assert np.array_equal(positions, expected_positions), "positions are consecutive"
    blocks = tables[sequences, positions // kv.block_size].astype(np.int64)
    expected_slots = blocks * kv.block_size + positions % kv.block_size
    assert np.array_equal(rows.slots, expected_slots), "slots follow the table"


def _columns(sequences: Sequence[SequenceRows]) -> tuple[NDArray[np.int64], ...]:
    """First rows, row counts, contexts and table lengths: int64 (sequences,) each."""
    fields = [
        (rows.query_start, rows.query_token_count, rows.context_token_count, len(rows.block_ids))
        for rows in sequences
    ]
    columns = np.array(fields, np.int64).reshape(len(fields), 4)
    return tuple(columns.T)


def check_copies(copies: tuple[BlockCopy, ...], kv: PagedKv) -> None:
    """Asserts that copies stay in the pool, and that none reads what another one writes."""
    sources = {copy.source_block_id for copy in copies}
    targets = {copy.target_block_id for copy in copies}
    assert len(targets) == len(copies), "a block is the target of one copy"
    assert not sources & targets, "no block is both source and target"
    for copy in copies:
        assert 0 < copy.source_block_id < kv.block_count, copy
        assert 0 < copy.target_block_id < kv.block_count, copy
        assert 0 < copy.token_count <= kv.block_size, copy
