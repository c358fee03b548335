"""A sequence of the naive model, its places in the index, and the plan for its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixd.controller.core.hints import NO_HINT, RetentionHint
from prefixd.controller.core.messages import (
    BlockCopy,
    BlockId,
    ForkEntry,
    FreedBlock,
    GroupPlan,
    Handle,
    Identity,
    SequenceId,
    SequencePlan,
    SlotRuns,
    TokenRange,
)
from tests.model.digests import ExtraKeys, extra_keys

Place = tuple[tuple[tuple[int, ...], ExtraKeys], ...]
"""The content of a block and of all blocks before it: tokens and extra keys of each."""


def place_of(
    token_ids: Sequence[int], identity: Identity, *, index: int, block_size: int, version: str
) -> Place:
    """Returns the place of block `index` of a sequence with these tokens."""
    return tuple(
        (
            tuple(token_ids[block * block_size : (block + 1) * block_size]),
            extra_keys(identity, block_index=block, block_size=block_size, model_version=version),
        )
        for block in range(index + 1)
    )


@dataclass
class NaiveSequence:
    """One open sequence.

    `scheduled_by[p]` is the step that scheduled position p; a matched position has the step that
    its block waits for. `completed` counts the leading blocks whose tokens are all known and whose
    positions are all scheduled. Of these the first `sealed_at` still count where what follows was
    evicted by name: it publishes nothing more then, and is not cacheable. `window_tables` has a
    table of every KV group behind the first, with block 0 at the places that it does not hold.
    """

    handle: Handle
    sequence_id: SequenceId
    identity: Identity
    version: str
    block_size: int
    cacheable: bool
    skip_cache_read: bool
    preemption_count: int
    token_ids: list[int]
    table: list[BlockId] = field(default_factory=list)
    window_tables: dict[int, list[BlockId]] = field(default_factory=dict)
    scheduled_by: list[int] = field(default_factory=list)
    completed: int = 0
    sealed_at: int = 0
    cached_count: int = 0
    cut: bool = False
    planned_step_id: int = 0
    retention_hint: RetentionHint = NO_HINT

    @property
    def known(self) -> int:
        """Tokens known."""
        return len(self.token_ids)

    @property
    def shared_count(self) -> int:
        """Leading completed blocks that stand for places."""
        return self.completed if self.cacheable else self.sealed_at

    @property
    def scheduled(self) -> int:
        """Tokens scheduled."""
        return len(self.scheduled_by)

    def tables(self) -> list[list[BlockId]]:
        """Returns the tables of all groups."""
        return [self.table, *self.window_tables.values()]

    def held_blocks(self) -> list[BlockId]:
        """Returns the blocks of all tables."""
        return [block for table in self.tables() for block in table if block]

    def place(self, index: int) -> Place:
        """Returns the place of a completed block."""
        return place_of(
            self.token_ids,
            self.identity,
            index=index,
            block_size=self.block_size,
            version=self.version,
        )

    def fork(self, entry: ForkEntry) -> NaiveSequence:
        """Returns a child that has the first tokens and the blocks that hold them (S16)."""
        count = entry.token_count
        return NaiveSequence(
            handle=entry.child_handle,
            sequence_id=entry.child_sequence_id,
            identity=self.identity,
            version=self.version,
            block_size=self.block_size,
            cacheable=self.cacheable,
            skip_cache_read=self.skip_cache_read,
            preemption_count=0,
            token_ids=self.token_ids[:count],
            table=self.table[: -(-count // self.block_size)],
            scheduled_by=self.scheduled_by[:count],
            completed=count // self.block_size,
            sealed_at=min(self.shared_count, count // self.block_size),
            cached_count=count,
            retention_hint=self.retention_hint,
        )

    def plan(
        self,
        *,
        cached: TokenRange,
        scheduled: TokenRange,
        lookahead: int,
        start_block: int,
        copies: tuple[BlockCopy, ...] = (),
        freed: tuple[FreedBlock, ...] = (),
    ) -> SequencePlan:
        """Returns the plan for positions just scheduled; the tables hold their blocks already."""
        positions = range(scheduled.start_token, scheduled.end_token + lookahead)
        groups: list[GroupPlan] = []
        for table in self.tables():
            slots = [
                table[position // self.block_size] * self.block_size + position % self.block_size
                for position in positions
            ]
            runs = SlotRuns(np.array(slots, np.int64), np.ones(len(slots), np.int64))
            appended = np.array(table[start_block:], np.int64)
            groups.append(GroupPlan(start_block=start_block, block_ids=appended, slots=runs))
        return SequencePlan(
            handle=self.handle,
            cached=cached,
            scheduled=scheduled,
            groups=tuple(groups),
            copies=copies,
            freed_blocks=freed,
        )
