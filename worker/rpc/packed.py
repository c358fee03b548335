"""Columns of 32-bit numbers on their way into a message, in one copy.

A list given to a repeated field is converted and checked number by number; a long prompt costs a
third of a millisecond so. The same field as it stands on the wire, merged into the message, is
copied whole. (The controller, which shares no code with the worker, does the same for arrays.)
"""

import sys
from array import array
from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

WIRE_TYPE_LENGTH_DELIMITED = 2
TYPE_CODES = {FieldDescriptor.TYPE_FIXED32: "I", FieldDescriptor.TYPE_SFIXED32: "i"}
"""How an array holds such values: in four bytes each."""


class PackedColumn:
    """A packed field of four-byte numbers (fixed32 or sfixed32) of one kind of message."""

    __slots__ = ("_tag", "_type_code")

    def __init__(self, message_class: type[Message], field_name: str) -> None:
        """Finds the field. KeyError: there is none; ValueError: its values are not packed so."""
        field = message_class.DESCRIPTOR.fields_by_name[field_name]
        if not field.is_packed or field.type not in TYPE_CODES:
            raise ValueError(f"{field.full_name} is not packed fixed32 or sfixed32")
        self._tag = _varint(field.number << 3 | WIRE_TYPE_LENGTH_DELIMITED)
        self._type_code = TYPE_CODES[field.type]

    def append(self, message: Message, values: Iterable[int]) -> None:
        """Appends values to the field of a message. OverflowError: a value does not fit."""
        column = array(self._type_code, values)
        if not column:
            return
        if sys.byteorder == "big":
            column.byteswap()
        byte_count = len(column) * column.itemsize
        message.MergeFromString(b"".join((self._tag, _varint(byte_count), column)))


def _varint(value: int) -> bytes:
    """Encodes a non-negative number in protobuf's base 128, lowest digits first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
