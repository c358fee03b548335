"""Columns that enter a message as they stand on the wire."""

import pytest

from prefixd.v1 import cache_pb2
from prefixd.worker.rpc.packed import PackedColumn


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 4_095, 4_096, 8_192])
def test_column_equals_the_list_it_was_made_of(count: int) -> None:
    """Appending a column equals filling the field number by number, on the wire too."""
    values = [number * 131 - 7 for number in range(count)]
    packed = cache_pb2.DecodeEntry(token_ids=[1])
    PackedColumn(cache_pb2.DecodeEntry, "token_counts").append(packed, values)
    filled = cache_pb2.DecodeEntry(token_ids=[1], token_counts=values)
    assert packed == filled
    assert packed.SerializeToString() == filled.SerializeToString()


def test_unsigned_column_holds_what_fits_and_nothing_else() -> None:
    """Token ids reach up to 2**32 - 1; a value beyond changes nothing."""
    column = PackedColumn(cache_pb2.OpenEntry, "token_ids")
    entry = cache_pb2.OpenEntry()
    column.append(entry, (2**32 - 1,))
    for value in (-1, 2**32):
        with pytest.raises(OverflowError):
            column.append(entry, [value])
    assert list(entry.token_ids) == [2**32 - 1]


@pytest.mark.parametrize("field_name", ["sequence_id", "lookahead_slot_count"])
def test_other_fields_are_refused(field_name: str) -> None:
    """A field that is no packed column of four-byte numbers is a mistake of the program."""
    with pytest.raises(ValueError, match=f"OpenEntry.{field_name} is not packed"):
        PackedColumn(cache_pb2.OpenEntry, field_name)
