"""What all ranks run, as bytes: no pickle, no tensors."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.model.forward import BlockCopy, ForwardPass, GroupRows

_ARRAYS_PER_GROUP = 4
_NUMBER = np.dtype("<i8")

Work: TypeAlias = ForwardPass | tuple[BlockCopy, ...]
"""A pass, or copies alone."""


def encode_work(work: Work) -> bytes:
    """A pass or copies as one array of int64: counts of parts, then the parts."""
    if isinstance(work, tuple):
        return _packed([_copy_rows(work)])
    assert not any(work.lora_names), "adapters are refused before"
    parts = [_copy_rows(work.copies), work.token_ids, work.positions, work.logit_rows]
    for group in work.groups:
        sequences = group.sequences
        tables = [np.asarray(rows.block_ids, dtype=_NUMBER) for rows in sequences]
        places = [
            (rows.query_start, rows.query_token_count, rows.context_token_count)
            for rows in sequences
        ]
        parts += [
            group.slots,
            np.array(places, dtype=_NUMBER).reshape(-1),
            np.array([len(table) for table in tables], dtype=_NUMBER),
            np.concatenate(tables),
        ]
    return _packed(parts)


def decode_work(frame: bytes) -> Work:
    """The inverse of `encode_work`."""
    copy_rows, *parts = _unpacked(frame)
    copies = tuple(BlockCopy(*row) for row in copy_rows.reshape(-1, 3).tolist())
    if not parts:
        return copies
    token_ids, positions, logit_rows, *group_parts = parts
    groups = tuple(
        _group(*group_parts[first : first + _ARRAYS_PER_GROUP])
        for first in range(0, len(group_parts), _ARRAYS_PER_GROUP)
    )
    return ForwardPass(
        token_ids=token_ids,
        positions=positions,
        groups=groups,
        logit_rows=logit_rows,
        copies=copies,
        lora_names=("",) * len(groups[0].sequences),
    )


def _group(
    slots: NDArray[np.int64],
    places: NDArray[np.int64],
    table_lengths: NDArray[np.int64],
    block_ids: NDArray[np.int64],
) -> GroupRows:
    tables = np.split(block_ids, np.cumsum(table_lengths)[:-1])
    return GroupRows(
        slots,
        tuple(
            SequenceRows(query_start, query_token_count, context_token_count, tuple(table.tolist()))
            for (query_start, query_token_count, context_token_count), table in zip(
                places.reshape(-1, 3).tolist(), tables, strict=True
            )
        ),
    )


def _copy_rows(copies: Sequence[BlockCopy]) -> NDArray[np.int64]:
    rows = [(copy.source_block_id, copy.target_block_id, copy.token_count) for copy in copies]
    return np.array(rows, dtype=_NUMBER).reshape(-1)


def _packed(parts: Sequence[NDArray[np.int64]]) -> bytes:
    head = np.array([len(parts), *map(len, parts)], dtype=_NUMBER)
    return np.concatenate([head, *parts]).astype(_NUMBER, copy=False).tobytes()


def _unpacked(frame: bytes) -> list[NDArray[np.int64]]:
    numbers = np.frombuffer(frame, dtype=_NUMBER).astype(np.int64)  # a copy: torch wants to write
    count = int(numbers[0])
    lengths, content = numbers[1 : count + 1], numbers[count + 1 :]
    return np.split(content, np.cumsum(lengths)[:-1])
