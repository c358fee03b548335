"""What rank 0 tells the other ranks beside passes, and what they answer: JSON, and no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from prefixd.worker.config import ModelConfig
from prefixd.worker.limits import SchedulerLimits


@dataclass(frozen=True, slots=True)
class Assignment:
    """The first thing that a rank is told.

    Attributes:
        rank: its own, from 1.
        store_port: where on this machine the ranks find one another.
        model: what all ranks load; it has no adapters.
    """

    rank: int
    store_port: int
    model: ModelConfig


def encode_assignment(assignment: Assignment) -> bytes:
    """An assignment as JSON."""
    assert not assignment.model.loras, "adapters are refused before"
    return json.dumps(asdict(assignment)).encode()


def decode_assignment(frame: bytes) -> Assignment:
    """The inverse of `encode_assignment`."""
    fields = json.loads(frame)
    model_fields = fields.pop("model")
    limits = SchedulerLimits(**model_fields.pop("limits"))
    model = ModelConfig(**{**model_fields, "loras": (), "limits": limits})
    return Assignment(model=model, **fields)


@dataclass(frozen=True, slots=True)
class Done:
    """A rank has done what it was told."""


@dataclass(frozen=True, slots=True)
class Fits:
    """How many blocks a rank's part of the pool has room for."""

    block_count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a rank ends."""

    reason: str


Answer = Done | Fits | Failed
_ANSWERS: Mapping[str, type[Answer]] = {kind.__name__: kind for kind in (Done, Fits, Failed)}


def encode_answer(answer: Answer) -> bytes:
    """An answer as JSON: its kind and its fields."""
    return json.dumps([type(answer).__name__, asdict(answer)]).encode()


def decode_answer(frame: bytes) -> Answer:
    """The inverse of `encode_answer`."""
    kind, fields = json.loads(frame)
    return _ANSWERS[kind](**fields)


def encode_number(number: int) -> bytes:
    """A number that every rank needs."""
    return str(number).encode()


def decode_number(frame: bytes) -> int:
    """The inverse of `encode_number`."""
    return int(frame)
