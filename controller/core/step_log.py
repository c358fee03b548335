"""The log of steps: ids, kept replies, and which step scheduled which position."""

from collections.abc import Iterator

import numpy as np

from prefixd.controller.core.errors import FieldInvalid, StepOutOfOrder, StepsInFlight
from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import IntArray, Step, StepId, StepReply
from prefixd.controller.core.sequences import SequenceColumns

EXECUTED = StepId(0)
"""Stands before every step id: written already."""


class StepLog:
    """Ids, replies and scheduled positions of the steps that are not settled.

    A step is settled once it is reported as executed or failed. Invariants:
    `executed_id <= applied_id`, `settled_id <= applied_id`; replies and snapshots are kept exactly
    for the ids in (settled_id, applied_id]; there are at most STEPS_IN_FLIGHT_MAX of them.
    """

    def __init__(self, columns: SequenceColumns) -> None:
        self.applied_id = StepId(0)
        self.executed_id = StepId(0)
        self.settled_id = StepId(0)
        self._columns = columns
        self._replies: dict[StepId, StepReply] = {}
        self._snapshots: dict[StepId, IntArray] = {}
        self._working_ids: set[StepId] = set()

    @property
    def working_count(self) -> int:
        """Unsettled steps that scheduled something; the others leave a worker nothing to do."""
        return len(self._working_ids)

    @property
    def next_id(self) -> StepId:
        """The id of the next step."""
        return StepId(self.applied_id + 1)

    def known_reply(self, step_id: StepId) -> StepReply | None:
        """Return the kept reply of a step sent again, None where the id is no kept one."""
        return self._replies.get(step_id)

    def check(self, step: Step) -> None:
        """Raise StepOutOfOrder, FieldInvalid or StepsInFlight where a step may not come next."""
        if step.step_id != self.next_id:
            raise StepOutOfOrder(
                f"step {step.step_id} came where {self.next_id} was expected",
                numbers={"step_id": step.step_id, "expected_step_id": self.next_id},
                field="step_id",
            )
        executed_id = step.executed_step_id
        if not self.executed_id <= executed_id <= self.applied_id:
            raise FieldInvalid(
                f"executed_step_id is {executed_id}, not in {self.executed_id}..{self.applied_id}",
                numbers={
                    "value": executed_id,
                    "low": self.executed_id,
                    "high": self.applied_id,
                },
                field="executed_step_id",
            )
        settled_id = max(self.settled_id, executed_id)
        if step.failed is not None:
            self._check_failed(step, settled_id)
            settled_id = self.applied_id
        unconfirmed_count = self.applied_id - settled_id
        if unconfirmed_count >= STEPS_IN_FLIGHT_MAX:
            raise StepsInFlight(
                f"{unconfirmed_count} steps are unconfirmed",
                numbers={
                    "unconfirmed_step_count": unconfirmed_count,
                    "steps_in_flight_max": STEPS_IN_FLIGHT_MAX,
                },
            )

    def _check_failed(self, step: Step, settled_id: StepId) -> None:
        assert step.failed is not None
        if step.failed.first_step_id != settled_id + 1:
            raise FieldInvalid(
                f"failed_step_id is {step.failed.first_step_id}, not {settled_id + 1}",
                numbers={"value": step.failed.first_step_id, "expected_step_id": settled_id + 1},
                field="failed_step_id",
            )
        last_id = step.failed.last_step_id
        if last_id != self.applied_id or last_id <= settled_id:
            raise FieldInvalid(
                f"failed_step_id_last is {last_id}, not the last applied id {self.applied_id}",
                numbers={"value": last_id, "applied_step_id": self.applied_id},
                field="failed_step_id_last",
            )

    def execute(self, executed_id: StepId) -> Iterator[StepId]:
        """Settle the steps up to an id one by one; yields each when its positions are written."""
        columns = self._columns
        for step_id in range(self.settled_id + 1, executed_id + 1):
            snapshot = self._snapshots.pop(StepId(step_id))
            row_count = len(snapshot)
            # A sequence that was cut and matched again may have more written than this step knew.
            written = columns.written[:row_count]
            np.maximum(written, np.minimum(columns.scheduled[:row_count], snapshot), out=written)
            self._settle(StepId(step_id))
            yield StepId(step_id)
        self.executed_id = executed_id

    def fail(self) -> None:
        """Settle all steps as not executed."""
        for step_id in range(self.settled_id + 1, self.applied_id + 1):
            del self._snapshots[StepId(step_id)]
            self._settle(StepId(step_id))

    def _settle(self, step_id: StepId) -> None:
        del self._replies[step_id]
        self._working_ids.discard(step_id)
        self.settled_id = step_id

    def append(self, reply: StepReply, *, has_work: bool) -> None:
        """Keep an applied step's reply and the positions scheduled after it."""
        columns = self._columns
        self.applied_id = reply.step_id
        self._replies[reply.step_id] = reply
        self._snapshots[reply.step_id] = columns.scheduled[: columns.row_count].copy()
        if has_work:
            self._working_ids.add(reply.step_id)

    def begin_row(self, row: int) -> None:
        """Forget what unsettled steps scheduled in a row: another sequence gets it."""
        for snapshot in self._snapshots.values():
            if row < len(snapshot):
                snapshot[row] = 0

    def rewind(self, row: int, *, position: int) -> None:
        """Forget that positions of a row from this one on were scheduled: they were rejected."""
        for snapshot in self._snapshots.values():
            if row < len(snapshot):
                snapshot[row] = min(int(snapshot[row]), position)

    def note_matched(self, row: int, *, step_id: StepId, end: int) -> None:
        """Say that a row's positions up to `end` are written once an unsettled step is executed."""
        for snapshot_id in self._snapshots:
            if snapshot_id >= step_id:
                snapshot = self._snapshot_with(snapshot_id, row)
                snapshot[row] = max(int(snapshot[row]), end)

    def inherit(self, row: int, *, parent_row: int, end: int) -> None:
        """Say that a fork's positions up to `end` were scheduled by the steps that its parent's
        were."""
        for snapshot_id in self._snapshots:
            snapshot = self._snapshot_with(snapshot_id, max(row, parent_row))
            snapshot[row] = min(int(snapshot[parent_row]), end)

    def _snapshot_with(self, snapshot_id: StepId, row: int) -> IntArray:
        snapshot = self._snapshots[snapshot_id]
        if row >= len(snapshot):
            grown = np.zeros(len(self._columns.scheduled), dtype=np.int64)
            grown[: len(snapshot)] = snapshot
            self._snapshots[snapshot_id] = snapshot = grown
        return snapshot

    def scheduled_before(self, row: int) -> int:
        """Count the leading positions of a row that earlier steps than the next one scheduled."""
        return max(bound for _, bound in self.scheduled_bounds(row))

    def scheduled_bounds(self, row: int) -> Iterator[tuple[StepId, int]]:
        """Tell which step scheduled which positions of a row, as ascending (step, end) pairs.

        The first pair is (EXECUTED, written count); positions behind the last pair belong to the
        step that is being applied.
        """
        yield EXECUTED, int(self._columns.written[row])
        for step_id, snapshot in self._snapshots.items():
            if row < len(snapshot):
                yield step_id, int(snapshot[row])
