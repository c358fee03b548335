"""Reads files of operation traces and of hash vectors, and says plainly what is wrong with them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from prefixd.controller.core.messages import Identity, LoraAdapter, MultimodalItem
from tests.model.digests import ALGORITHMS

OPERATIONS = ("append", "chunk", "free", "new", "preempt", "reset", "resume")
"""What an operation of a trace can be."""


class FormatError(Exception):
    """The file is not of the expected format; the message says where."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to one block, or ("cleared") to all of them, as in the trace files.

    `digest64` and `parent64` are the last 8 bytes of digests, big-endian.
    """

    kind: str
    digest64: int | None = None
    parent64: int | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a trace with what is known after it.

    `result` is as recorded; `digest` and `events` are None where none were recorded (an `append`
    that ran out).
    """

    name: str
    sequence_id: str
    token_ids: tuple[int, ...]
    identity: Identity
    schedule_token_count_max: int | None
    lookahead_slot_count: int
    result: object
    free_order: tuple[int, ...] | None
    digest: str | None
    events: tuple[BlockEvent, ...] | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A pool and the operations on it, with the counters at their end."""

    block_count: int
    block_size: int
    caching_disabled: bool
    hash_algorithm: str
    hash_seed: str
    operations: tuple[Operation, ...]
    statistics: Mapping[str, int]


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises FormatError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turns a missing or misshapen field into a FormatError that names the place."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    except KeyError as error:
        raise FormatError(f"{where}: no field {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise FormatError(f"{where}: {error}") from error


def require(condition: bool, message: str) -> None:
    """Raises FormatError with the message unless the condition holds."""
    if not condition:
        raise FormatError(message)


def as_token_ids(row: Any) -> tuple[int, ...]:
    """Returns a list of token ids. Raises FormatError where it is not one."""
    require(
        isinstance(row, list) and all(type(token) is int and 0 <= token < 2**32 for token in row),
        "tokens must be a list of integers of 32 bits",
    )
    return tuple(row)


def as_algorithm(name: Any) -> str:
    """Returns the name of a known hash algorithm. Raises FormatError for another."""
    require(name in ALGORITHMS, f"unknown hash algorithm {name!r}")
    return str(name)


def load_traces(path: Path) -> tuple[Trace, ...]:
    """Reads a file of operation traces. Raises FormatError."""
    rows = read_json(path)
    with reading(str(path)):
        require(isinstance(rows, list) and bool(rows), "expected a list of traces")
        return tuple(_trace(row, f"trace {index}") for index, row in enumerate(rows))


def _trace(row: Any, where: str) -> Trace:
    with reading(where):
        require(isinstance(row["ops"], list), "ops must be a list")
        return Trace(
            block_count=int(row["num_blocks"]),
            block_size=int(row["block_size"]),
            caching_disabled=not row["enable_caching"],
            hash_algorithm=as_algorithm(row["hash"]),
            hash_seed=str(row["pythonhashseed"]),
            operations=tuple(
                _operation(operation, f"operation {index}")
                for index, operation in enumerate(row["ops"])
            ),
            statistics={
                name: int(count) for name, count in row["stats"].items() if name != "reset"
            },
        )


def _operation(row: Any, where: str) -> Operation:
    with reading(where):
        require(row["op"] in OPERATIONS, f"unknown operation {row['op']!r}")
        bound = row.get("n" if row["op"] == "chunk" else "chunk")
        state = row.get("free_queue")
        return Operation(
            name=row["op"],
            sequence_id="" if row["op"] == "reset" else str(row["id"]),
            token_ids=as_token_ids(row["tokens"]) if row["op"] in ("new", "append") else (),
            identity=identity_of(row),
            schedule_token_count_max=None if bound is None else int(bound),
            lookahead_slot_count=int(row.get("lookahead") or 0),
            result=row["result"],
            free_order=None if state is None else tuple(int(block) for block in state),
            digest=None if state is None else str(row["digest"]),
            events=(
                tuple(chain.from_iterable(map(_events, row["events"]))) if "events" in row else None
            ),
        )


def _events(row: Any) -> Iterator[BlockEvent]:
    """Gives the events of the single blocks that one recorded event is about."""
    match row:
        case ["BlockRemoved", int(digest), *_]:
            yield BlockEvent("removed", digest)
        case ["BlockStored", list(digests), parent, list(token_ids), *_]:
            size, rest = divmod(len(token_ids), max(1, len(digests)))
            require(rest == 0, "an event has no whole number of tokens per block")
            for index, digest in enumerate(digests):
                tokens = as_token_ids(token_ids[index * size : (index + 1) * size])
                yield BlockEvent("stored", int(digest), parent, tokens)
                parent = digest
        case ["AllBlocksCleared"]:
            yield BlockEvent("cleared")
        case _:
            raise FormatError(f"unknown event {row!r}")


def identity_of(row: Any) -> Identity:
    """Returns the identity of a `new` operation."""
    lora = row.get("lora")
    return Identity(
        lora=None if lora is None else LoraAdapter(name=str(lora[0]), path=str(lora[1])),
        multimodal_items=tuple(
            MultimodalItem(identifier=str(name), offset=int(offset), token_count=int(length))
            for name, offset, length in row.get("mm") or ()
        ),
        cache_salt=row.get("salt") or "",
    )
