"""Drives one pool of the core, step by step, with the invariants checked after each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefixd.controller.core import inspect, invariants
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseOutcome,
    CloseReason,
    DecodeEntry,
    DecodeOutcome,
    Entry,
    ExtendEntry,
    ExtendOutcome,
    FailedSteps,
    ForkEntry,
    ForkOutcome,
    Handle,
    Identity,
    OpenEntry,
    OpenOutcome,
    Outcome,
    PoolSpec,
    PrefixMatch,
    Refusal,
    SequenceId,
    Step,
    StepId,
    StepReply,
)
from prefixd.controller.core.pool import Pool

NOBODY = Identity()

Row = tuple[int, int, int, list[int]]
"""Handle, scheduled count before, known count before, tokens."""


def tokens(token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Returns token ids as the core takes them."""
    return np.array(token_ids, dtype=np.uint32)


def open_entry(handle: int, token_ids: Sequence[int], **fields: Any) -> OpenEntry:
    """Returns an entry that opens sequence "s<handle>"."""
    fields.setdefault("sequence_id", SequenceId(f"s{handle}"))
    return OpenEntry(handle=Handle(handle), token_ids=tokens(token_ids), **fields)


def extend_entry(
    handle: int, token_ids: Sequence[int], *, known: int, scheduled: int, **fields: Any
) -> ExtendEntry:
    """Returns an entry that extends a sequence."""
    return ExtendEntry(
        handle=Handle(handle),
        known_count_before=known,
        scheduled_count_before=scheduled,
        token_ids=tokens(token_ids),
        **fields,
    )


def fork_entry(
    parent: int, child: int, token_count: int, *, sequence_id: str | None = None
) -> ForkEntry:
    """Returns an entry that forks a sequence; the child is "s<handle>" unless named."""
    name = SequenceId(f"s{child}" if sequence_id is None else sequence_id)
    return ForkEntry(Handle(parent), Handle(child), name, token_count)


def close_entry(handle: int, reason: CloseReason = CloseReason.FINISHED) -> CloseEntry:
    """Returns an entry that closes a sequence."""
    return CloseEntry(Handle(handle), reason)


def decode_entry(*rows: Row) -> DecodeEntry:
    """Returns a decode entry of rows."""
    handles, scheduled, known, row_tokens = zip(*rows, strict=True)
    return DecodeEntry(
        handles=np.array(handles, dtype=np.int64),
        scheduled_count_before=np.array(scheduled, dtype=np.int64),
        known_count_before=np.array(known, dtype=np.int64),
        token_counts=np.array([len(row) for row in row_tokens], dtype=np.int64),
        token_ids=tokens([token for row in row_tokens for token in row]),
    )


class Driver:
    """A pool and its driver. Steps are numbered; by default all earlier ones are executed."""

    def __init__(
        self,
        *,
        block_count: int = 11,
        block_size: int = 4,
        algorithm: str = "sha256_cbor",
        **spec: Any,
    ) -> None:
        self.pool = Pool(
            PoolSpec("pool", block_count=block_count, block_size=block_size, **spec),
            epoch=1,
            hasher=Hasher(algorithm, seed="0"),
        )
        self.now_ms = 0

    def step(
        self,
        *entries: Entry,
        executed: int | None = None,
        failed: tuple[int, int] | None = None,
        budget: int | None = None,
    ) -> StepReply:
        """Sends the next step."""
        last = self.pool.applied_step_id
        return self.send(
            Step(
                step_id=StepId(last + 1),
                executed_step_id=StepId(last if executed is None else executed),
                entries=entries,
                failed=None
                if failed is None
                else FailedSteps(StepId(failed[0]), StepId(failed[1])),
                token_budget=budget,
            )
        )

    def send(self, step: Step) -> StepReply:
        """Sends any step; the pool's invariants hold afterwards, whatever came of it."""
        try:
            return self.pool.apply_step(step, now_ms=self.now_ms)
        finally:
            invariants.check(self.pool)

    def outcome(self, entry: Entry, **step: Any) -> Outcome:
        """Sends a step of one entry and returns what came of it."""
        (outcome,) = self.step(entry, **step).outcomes
        return outcome

    def open(self, handle: int, token_ids: Sequence[int], **fields: Any) -> OpenOutcome:
        """Opens a sequence in a step of its own."""
        outcome = self.outcome(open_entry(handle, token_ids, **fields))
        assert isinstance(outcome, OpenOutcome), outcome
        return outcome

    def extend(self, handle: int, token_ids: Sequence[int], **fields: Any) -> ExtendOutcome:
        """Extends a sequence in a step of its own; the positions are the pool's."""
        view = self.sequence(handle)
        entry = extend_entry(
            handle, token_ids, known=view.known_count, scheduled=view.scheduled_count, **fields
        )
        outcome = self.outcome(entry)
        assert isinstance(outcome, ExtendOutcome), outcome
        return outcome

    def fork(self, parent: int, child: int, token_count: int) -> ForkOutcome:
        """Forks a sequence in a step of its own."""
        outcome = self.outcome(fork_entry(parent, child, token_count))
        assert isinstance(outcome, ForkOutcome), outcome
        return outcome

    def row(self, handle: int, token_id: int) -> Row:
        """Returns a decode row that supplies the next token of a sequence as it stands."""
        view = self.sequence(handle)
        return (handle, view.scheduled_count, view.known_count, [token_id])

    def decode(self, handle: int, token_id: int) -> int:
        """Decodes one token in a step of its own; returns the new block, 0 for none."""
        outcome = self.outcome(decode_entry(self.row(handle, token_id)))
        assert isinstance(outcome, DecodeOutcome), outcome
        assert outcome.deferred_rows == ()
        return int(outcome.new_block_ids[0][0])

    def close(self, handle: int, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Closes a sequence in a step of its own."""
        assert self.outcome(close_entry(handle, reason)) == CloseOutcome()

    def refused(self, entry: Entry, **step: Any) -> Refusal:
        """Sends a step of one entry that must be refused and change nothing that can be seen.

        A step before it confirms what is unconfirmed, which may be seen.
        """
        self.step()
        before = self.seen()
        outcome = self.outcome(entry, **step)
        assert isinstance(outcome, Refusal), outcome
        assert self.seen() == before
        return outcome

    def match(self, token_ids: Sequence[int], identity: Identity = NOBODY) -> PrefixMatch:
        """Asks how much of a prompt is cached."""
        return self.pool.match_prefix(tokens(token_ids), identity)

    def sequence(self, handle: int) -> inspect.SequenceView:
        """Shows a sequence."""
        return inspect.sequence(self.pool, self.name(handle))

    def name(self, handle: int) -> str:
        """Returns the id of an open sequence."""
        return self.pool.state.sequences[Handle(handle)].sequence_id

    def table(self, handle: int) -> list[int]:
        """Returns the block table of the first KV group."""
        table, *_ = inspect.block_tables(self.pool, self.name(handle))
        return [int(block_id) for block_id in table]

    def free_order(self) -> list[int]:
        """Returns the free order."""
        return [int(block_id) for block_id in inspect.free_order(self.pool)]

    def blocks(self) -> tuple[inspect.BlockView, ...]:
        """Shows all blocks."""
        return inspect.blocks(self.pool, after=0, count=self.pool.spec.block_count)

    def published(self) -> dict[int, bytes]:
        """Returns the digests of the published blocks."""
        return {
            block.block_id: block.block_hash
            for block in self.blocks()
            if block.block_hash is not None
        }

    def pending(self) -> list[int]:
        """Returns the pending blocks."""
        return [
            block.block_id
            for block in self.blocks()
            if block.content is inspect.BlockContent.PENDING
        ]

    def seen(self) -> tuple[object, ...]:
        """Returns everything that an operator can see of the pool, but the steps."""
        view = inspect.pool_view(self.pool)
        return (
            self.free_order(),
            [repr(block) for block in self.blocks()],
            [repr(row) for row in inspect.sequences(self.pool, after="", count=1_000)],
            {handle: self.table(handle) for handle in self.pool.state.sequences},
            view.statistics,
            view.revision,
        )


def new_block_ids(outcome: OpenOutcome | ExtendOutcome) -> list[int]:
    """Returns the blocks that a plan appends."""
    return [int(block_id) for block_id in outcome.plan.groups[0].block_ids]


def slots(outcome: OpenOutcome | ExtendOutcome) -> list[int]:
    """Returns the slots that a plan names, one by one."""
    runs = outcome.plan.groups[0].slots
    return [
        slot
        for first, count in zip(runs.first_slots.tolist(), runs.slot_counts.tolist(), strict=True)
        for slot in range(first, first + count)
    ]
