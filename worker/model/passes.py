"""Which chunks of a step run in a pass of their own, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

from prefixd.worker.model.forward import Chunk


@dataclass(frozen=True, slots=True)
class PassSplit:
    """The chunks of a step by the pass that computes them, as ascending indices.

    Invariant: no chunk of the first pass reads a block that a chunk of the second one writes.

    Attributes:
        mixed: run first, together.
        decode: run second: one token each, without adapter.
    """

    mixed: tuple[int, ...]
    decode: tuple[int, ...]


def split_passes(chunks: Sequence[Chunk], *, block_size: int) -> PassSplit:
    """Sets rows of decode apart from prompts, so that they can be a recorded pass.

    Prompts come first, for a row may belong to a sequence that joins a prefix which a prompt of
    this step writes. A row that itself writes into what a chunk of the first pass reads goes with
    that chunk.

    Args:
        chunks: of one step.
        block_size: slots per block.
    """
    mixed = {index for index, chunk in enumerate(chunks) if not _is_row(chunk)}
    rows = {index for index in range(len(chunks)) if index not in mixed}
    joining = mixed
    while joining and rows:
        read = [_read_blocks([chunks[i] for i in joining], group) for group in _groups(chunks)]
        joining = {index for index in rows if _writes_into(chunks[index], read, block_size)}
        mixed |= joining
        rows -= joining
    return PassSplit(tuple(sorted(mixed)), tuple(sorted(rows)))


def _is_row(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and not chunk.lora_name


def _groups(chunks: Sequence[Chunk]) -> range:
    return range(len(chunks[0].tables))


def _read_blocks(chunks: Sequence[Chunk], group: int) -> set[int]:
    return {block_id for chunk in chunks for block_id in chunk.tables[group]}


def _writes_into(chunk: Chunk, read: Sequence[set[int]], block_size: int) -> bool:
    return any(
        slots[0] // block_size in blocks for slots, blocks in zip(chunk.slots, read, strict=True)
    )
