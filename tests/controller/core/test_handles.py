"""Rows by handle, one at a time and for whole batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixd.controller.core.handles import HandleRows

HANDLES = st.one_of(
    st.integers(0, 40), st.integers(0, 8).map(lambda n: n * 1_024), st.just(2**32 - 1)
)
"""Few enough to meet again, and some that share their low bits."""


@given(st.lists(st.tuples(st.booleans(), HANDLES)), st.lists(HANDLES, min_size=1))
def test_batch_finds_what_single_look_ups_find(
    changes: list[tuple[bool, int]], batch: list[int]
) -> None:
    """After any entering and leaving, a batch gets the same rows as its handles one by one."""
    rows = HandleRows()
    expected: dict[int, int] = {}
    free_rows: list[int] = []
    row_count = 0
    for enters, handle in changes:
        if enters and handle not in expected:
            if not free_rows:
                free_rows.append(row_count)
                row_count += 1
            expected[handle] = rows[handle] = free_rows.pop()
        elif not enters and handle in expected:
            free_rows.append(expected.pop(handle))
            del rows[handle]
    assert dict(rows) == expected
    found, is_entered = rows.rows_of(np.array(batch, dtype=np.int64))
    assert is_entered.tolist() == [handle in expected for handle in batch]
    assert found[is_entered].tolist() == [
        expected[handle] for handle in batch if handle in expected
    ]


def test_batch_that_shares_low_bits_is_found() -> None:
    """More handles than the arrays began with, all of which choose one place, have their rows."""
    rows = HandleRows()
    handles = [number * 2**20 for number in range(700)]
    for row, handle in enumerate(handles):
        rows[handle] = row
    found, is_entered = rows.rows_of(np.array(handles, dtype=np.int64))
    assert is_entered.all()
    assert found.tolist() == list(range(700))


def test_empty_batch_has_no_rows() -> None:
    """No handle, no row."""
    found, is_entered = HandleRows().rows_of(np.array([], dtype=np.int64))
    assert len(found) == len(is_entered) == 0
