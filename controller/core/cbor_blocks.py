"""Canonical CBOR of many blocks at once, byte-identical to cbor2's.

A block is array(3)[byte string parent, array(n)[unsigned token ids], null or array of extra keys]
(RFC 8949, sections 3 and 4.2.1: integers in their shortest form). All token ids are encoded by a
few numpy operations; only the parents, each the digest of the block before, come in one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cbor2
import numpy as np
import numpy.typing as npt

_BYTE_STRING = 2 << 5
_ARRAY = 4 << 5
_NULL = 0xF6
_ONE_BYTE = 24
_TWO_BYTES = 25
_FOUR_BYTES = 26
_LONGEST_ITEM = 5


def encode_parent_head(digest_size: int) -> bytes:
    """Return what stands in front of the parent digest: array(3) and the byte string's head."""
    return bytes((_ARRAY | 3,)) + _head(_BYTE_STRING, digest_size)


def _head(major_type: int, count: int) -> bytes:
    if count < _ONE_BYTE:
        return bytes((major_type | count,))
    if count < 1 << 8:
        return bytes((major_type | _ONE_BYTE, count))
    return bytes((major_type | _TWO_BYTES,)) + count.to_bytes(2, "big")


def encode_contents(packed_tokens: bytes, extra_keys: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Return what stands behind the parent digest of each block: token ids and extra keys.

    `packed_tokens`: four little-endian bytes per token, as many tokens in each block.
    """
    token_ids = np.frombuffer(packed_tokens, dtype="<u4").reshape(len(extra_keys), -1)
    has_keys = np.zeros(len(extra_keys), dtype=np.bool_)
    if any(extra_keys):
        has_keys[:] = [bool(keys) for keys in extra_keys]
    encoded, ends = _encode_token_ids(token_ids, has_keys)
    starts = [0, *ends[:-1]]
    contents = [encoded[start:end] for start, end in zip(starts, ends, strict=True)]
    for index in np.flatnonzero(has_keys).tolist():
        contents[index] += cbor2.dumps(extra_keys[index], canonical=True)
    return contents


def _encode_token_ids(
    token_ids: npt.NDArray[np.uint32], has_keys: npt.NDArray[np.bool_]
) -> tuple[bytes, list[int]]:
    """Encode a row of integers per block, with null behind it where the block has no extra keys.

    Every integer gets five cells, of which its shortest form uses some. Returns the used cells and
    the end of each row in them.
    """
    row_count, column_count = token_ids.shape
    head = _head(_ARRAY, column_count)
    first = len(head)
    last = first + _LONGEST_ITEM * column_count
    cells = np.empty((row_count, last + 1), dtype=np.uint8)
    is_used = np.empty((row_count, last + 1), dtype=np.bool_)
    cells[:, :first] = np.frombuffer(head, dtype=np.uint8)
    is_used[:, :first] = True
    cells[:, last] = _NULL
    is_used[:, last] = ~has_keys

    needs_one = token_ids >= _ONE_BYTE
    needs_two = token_ids >= 1 << 8
    needs_four = token_ids >= 1 << 16
    heads = token_ids.astype(np.uint8)
    heads[needs_one] = _ONE_BYTE
    heads[needs_two] = _TWO_BYTES
    heads[needs_four] = _FOUR_BYTES
    bytes_of = token_ids.astype(">u4").view(np.uint8).reshape(row_count, column_count, 4)
    for at, values, used in (
        (0, heads, True),
        (1, bytes_of[:, :, 0], needs_four),
        (2, bytes_of[:, :, 1], needs_four),
        (3, bytes_of[:, :, 2], needs_two),
        (4, bytes_of[:, :, 3], needs_one),
    ):
        cells[:, first + at : last : _LONGEST_ITEM] = values
        is_used[:, first + at : last : _LONGEST_ITEM] = used
    # Summed over the tokens, of which there are a fifth as many as cells.
    longer_by = needs_one.view(np.uint8) + needs_two.view(np.uint8) + 2 * needs_four.view(np.uint8)
    lengths = first + column_count + longer_by.sum(axis=1, dtype=np.int64) + ~has_keys
    ends = np.cumsum(lengths)
    # A fifth of the time of cells[is_used].
    return np.compress(is_used.ravel(), cells.ravel()).tobytes(), ends.tolist()
