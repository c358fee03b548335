"""A pool of the core and the naive model, given the same steps and compared after each."""

import numpy as np

from prefixd.controller.core import inspect, invariants
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    Entry,
    FailedSteps,
    Handle,
    OpenEntry,
    Outcome,
    PoolSpec,
    SequenceId,
    Step,
    StepId,
)
from prefixd.controller.core.pool import Pool
from tests.model.compare import assert_equal_pools, assert_equal_replies
from tests.model.digests import root_digest
from tests.model.steps import NaiveLog

ALGORITHM = "sha256_cbor"
SEED = "0"


def opening(handle: int, *token_ids: int, skip_cache_read: bool = False) -> OpenEntry:
    """Opens a sequence whose name follows its handle."""
    return OpenEntry(
        Handle(handle),
        SequenceId(f"s{handle}"),
        np.array(token_ids, np.uint32),
        skip_cache_read=skip_cache_read,
    )


def closing(handle: int) -> CloseEntry:
    """Closes a sequence."""
    return CloseEntry(Handle(handle), CloseReason.FINISHED)


class Pair:
    """Both pools; `step` leaves what it schedules unconfirmed until `confirm` or `fail`."""

    def __init__(self, *, block_count: int, block_size: int) -> None:
        spec = PoolSpec(pool_name="pair", block_count=block_count, block_size=block_size)
        self.pool = Pool(spec, epoch=1, hasher=Hasher(ALGORITHM, seed=SEED))
        self.model = NaiveLog(spec)

    def step(self, *entries: Entry) -> tuple[Outcome, ...]:
        """Applies a step that confirms nothing."""
        return self._apply(entries, executed=self.model.executed_step_id)

    def confirm(self, *entries: Entry, up_to: int | None = None) -> tuple[Outcome, ...]:
        """Applies a step that confirms all steps before it, or those up to one."""
        executed = self.model.applied_step_id if up_to is None else up_to
        return self._apply(entries, executed=executed)

    def fail(self) -> tuple[Outcome, ...]:
        """Applies a step that reports every unconfirmed one as failed."""
        first = StepId(self.model.settled_step_id + 1)
        failed = FailedSteps(first, StepId(self.model.applied_step_id))
        return self._apply((), executed=self.model.executed_step_id, failed=failed)

    def _apply(
        self, entries: tuple[Entry, ...], *, executed: int, failed: FailedSteps | None = None
    ) -> tuple[Outcome, ...]:
        step_id = StepId(self.model.applied_step_id + 1)
        step = Step(step_id, StepId(executed), entries, failed)
        reply = self.pool.apply_step(step, now_ms=step_id)
        assert_equal_replies(of_core=reply, of_model=self.model.apply_step(step))
        invariants.check(self.pool)
        root = root_digest(ALGORITHM, seed=SEED)
        assert_equal_pools(self.pool, self.model, algorithm=ALGORITHM, root=root)
        return reply.outcomes

    def table(self, handle: int) -> list[int]:
        """Returns a sequence's block table."""
        (table,) = inspect.block_tables(self.pool, f"s{handle}")
        return [int(block) for block in table]

    def free_order(self) -> list[int]:
        """Returns the free order."""
        return [int(block) for block in inspect.free_order(self.pool)]

    def published(self) -> set[int]:
        """Returns the blocks that are published."""
        return {int(block) for block in self.model.published()}
