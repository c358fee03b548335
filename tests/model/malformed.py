"""Steps that the core must refuse as a whole, by the reason and what is wrong with them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from prefixd.controller.core.messages import (
    DecodeEntry,
    Entry,
    ExtendEntry,
    FailedSteps,
    ForkEntry,
    Handle,
    OpenEntry,
    SequenceId,
    Step,
    StepId,
)
from tests.model.steps import NaiveLog

FRESH_HANDLE = Handle(900_000)
VALID = OpenEntry(FRESH_HANDLE, SequenceId("valid"), np.array([1, 2, 1], np.uint32))
"""Stands in front of the bad entry: it must not be applied either."""


def _step(model: NaiveLog, *entries: Entry) -> Step:
    return Step(StepId(model.applied_step_id + 1), StepId(model.applied_step_id), (VALID, *entries))


def _open(token_ids: list[int], *, name: str = "bad", **changed: Any) -> Callable[[NaiveLog], Step]:
    entry = OpenEntry(
        Handle(FRESH_HANDLE + 1), SequenceId(name), np.array(token_ids, np.uint32), **changed
    )
    return lambda model: _step(model, entry)


def _extend(**changed: Any) -> Callable[[NaiveLog], Step]:
    numbers = {"known_count_before": 1, "scheduled_count_before": 1} | changed
    entry = ExtendEntry(FRESH_HANDLE, token_ids=np.array([1], np.uint32), **numbers)
    return lambda model: _step(model, entry)


def _decode(
    handles: list[int], *, token_counts: list[int], token_ids: list[int], scheduled: int = 1
) -> Callable[[NaiveLog], Step]:
    entry = DecodeEntry(
        handles=np.array(handles, np.int64),
        scheduled_count_before=np.full(len(handles), scheduled, np.int64),
        known_count_before=np.ones(len(handles), np.int64),
        token_counts=np.array(token_counts, np.int64),
        token_ids=np.array(token_ids, np.uint32),
    )
    return lambda model: _step(model, entry)


def _step_numbers(
    *, ahead: int = 1, executed: int = 0, budget: int | None = None
) -> Callable[[NaiveLog], Step]:
    def make(model: NaiveLog) -> Step:
        applied = model.applied_step_id
        return Step(
            StepId(applied + ahead), StepId(applied + executed), (VALID,), token_budget=budget
        )

    return make


def _failed(*, first: int, last: int) -> Callable[[NaiveLog], Step]:
    def make(model: NaiveLog) -> Step:
        applied = model.applied_step_id
        failed = FailedSteps(StepId(applied + first), StepId(applied + last))
        return Step(StepId(applied + 1), StepId(applied), (VALID,), failed)

    return make


def _fork(**changed: Any) -> Callable[[NaiveLog], Step]:
    parts = {
        "parent_handle": FRESH_HANDLE,
        "child_handle": Handle(FRESH_HANDLE + 1),
        "child_sequence_id": SequenceId("child"),
        "token_count": 1,
    }
    entry = ForkEntry(**(parts | changed))
    return lambda model: _step(model, entry)


MALFORMED: dict[str, Callable[[NaiveLog], Step]] = {
    "TOKEN_ID_INVALID in an open": _open([1, 9, 1]),
    "TOKEN_ID_INVALID in a decode": _decode([3], token_counts=[1], token_ids=[8]),
    "PROMPT_EMPTY": _open([]),
    "FIELD_INVALID name": _open([1], name=""),
    "FIELD_INVALID long name": _open([1], name="x" * 257),
    "FIELD_INVALID lookahead": _open([1], lookahead_slot_count=-1),
    "FIELD_INVALID bound": _open([1], schedule_token_count_max=-1),
    "FIELD_INVALID must fit": _open([1], must_fit_token_count=-1),
    "FIELD_INVALID preemptions": _open([1], preemption_count=-1),
    "FIELD_INVALID awaited": _open([1], await_token_count_min=-1),
    "FIELD_INVALID known": _extend(known_count_before=-1),
    "FIELD_INVALID scheduled": _extend(scheduled_count_before=-1),
    "FIELD_INVALID drafts": _extend(draft_token_count=-1),
    "FIELD_INVALID rollback": _extend(rollback_to_token_count=0),
    "FIELD_INVALID rows": _decode([3, 3], token_counts=[1, 1], token_ids=[1, 1]),
    "FIELD_INVALID counts": _decode([3, 4], token_counts=[1, 1], token_ids=[1]),
    "FIELD_INVALID negative count": _decode([3, 4], token_counts=[2, -1], token_ids=[1]),
    "FIELD_INVALID place": _decode([3], token_counts=[1], token_ids=[1], scheduled=-1),
    "FIELD_INVALID budget": _step_numbers(budget=-1),
    "FIELD_INVALID executed": _step_numbers(executed=1),
    "FIELD_INVALID failed": _failed(first=1, last=1),
    "FIELD_INVALID failed range": _failed(first=0, last=0),
    "STEP_OUT_OF_ORDER": _step_numbers(ahead=2),
    "FIELD_INVALID fork of nothing": _fork(token_count=0),
    "FIELD_INVALID fork's name": _fork(child_sequence_id=SequenceId("")),
    "FIELD_INVALID fork's handle": _fork(child_handle=Handle(-1)),
    "FIELD_INVALID parent's handle": _fork(parent_handle=Handle(2**32)),
    "FIELD_INVALID handle of two": _fork(child_handle=FRESH_HANDLE),
}
"""The first word is the reason that the refusal must name."""
