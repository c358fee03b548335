"""Columns that enter a message as they stand on the wire."""

import numpy as np
import pytest

from prefixd.controller.rpc.packed import PackedColumn
from prefixd.v1 import cache_pb2, types_pb2

LENGTHS = [0, 1, 31, 32, 33, 4_095, 4_096, 8_192]
"""On both sides of where the length of the column takes another byte."""


@pytest.mark.parametrize("count", LENGTHS)
def test_column_equals_the_list_it_was_made_of(count):
    """Appending an array equals filling the field number by number, on the wire too."""
    values = np.arange(count, dtype=np.int64) * 131 - 7
    packed = cache_pb2.GroupPlan(start_block=3)
    PackedColumn(cache_pb2.GroupPlan, "block_ids").append(packed, values)
    filled = cache_pb2.GroupPlan(start_block=3, block_ids=values.tolist())
    assert packed == filled
    assert packed.SerializeToString() == filled.SerializeToString()


def test_unsigned_column_holds_the_largest_value():
    """A fixed32 column reaches up to 2**32 - 1."""
    entry = cache_pb2.OpenEntry()
    PackedColumn(cache_pb2.OpenEntry, "token_ids").append(entry, np.array([2**32 - 1]))
    assert list(entry.token_ids) == [2**32 - 1]


def test_column_may_be_any_slice_of_an_array():
    """Values that do not stand side by side arrive in their order."""
    plan = cache_pb2.GroupPlan()
    PackedColumn(cache_pb2.GroupPlan, "block_ids").append(plan, np.arange(9)[::-2])
    assert list(plan.block_ids) == [8, 6, 4, 2, 0]


def test_second_append_follows_the_first():
    """What is in the field stays in it."""
    slots = types_pb2.SlotRuns(first_slots=[5])
    PackedColumn(types_pb2.SlotRuns, "first_slots").append(slots, np.array([6, 7]))
    assert list(slots.first_slots) == [5, 6, 7]


@pytest.mark.parametrize("field_name", ["sequence_id", "lookahead_slot_count"])
def test_other_fields_are_refused(field_name):
    """A field that is no packed column of four-byte numbers is a mistake of the program."""
    with pytest.raises(ValueError, match=f"OpenEntry.{field_name} is not packed"):
        PackedColumn(cache_pb2.OpenEntry, field_name)
