"""What the parts of one pool share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.controller.core.claims import Claims
from prefixd.controller.core.digest_accounts import digest_accounts
from prefixd.controller.core.digests import DigestWork
from prefixd.controller.core.events import EventLog
from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.handles import HandleRows
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.index import PrefixIndex
from prefixd.controller.core.messages import (
    DecodeEntry,
    Handle,
    IntArray,
    PoolSpec,
    SequenceId,
    StepId,
    TokenArray,
)
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from prefixd.controller.core.sequences import TOKEN_BYTES, Sequence, SequenceColumns
from prefixd.controller.core.statistics import Statistics
from prefixd.controller.core.step_log import StepLog
from prefixd.controller.core.supply import Supply
from prefixd.controller.core.twins import Twins
from prefixd.controller.core.window_digests import WindowDigests
from prefixd.controller.core.window_index import WindowIndex
from prefixd.controller.core.window_twins import WindowTwins
from prefixd.controller.core.windows import WindowGroups

PREEMPTED_MAX = 65_536
"""Preempted sequences whose scheduled counts are remembered until they are opened again."""


@dataclass(slots=True)
class StepContext:
    """The step that is being applied; `budget_left` is None where it has no token budget."""

    step_id: StepId
    now_ms: int
    budget_left: int | None
    scheduled_count: int = 0
    copy_count: int = 0

    @property
    def has_work(self) -> bool:
        """Whether the step leaves its worker something to do."""
        return self.scheduled_count > 0 or self.copy_count > 0

    def spend(self, token_count: int) -> None:
        """Account for positions that an entry scheduled."""
        self.scheduled_count += token_count
        if self.budget_left is not None:
            self.budget_left -= token_count


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What a decode entry of regular rows left to do behind its reply.

    The rows that need a block have got the `block_ids`, in order. Whatever becomes of the rest, no
    block changes its place in the free order.
    """

    step_id: StepId
    entry: DecodeEntry
    rows: IntArray
    needs_block: npt.NDArray[np.bool_]
    block_ids: array[int]


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """A sequence whose open left its tokens to be known and its blocks to enter the index, behind
    the reply. Step `step_id` writes all of its blocks that are not matched.
    """

    step_id: StepId
    sequence: Sequence
    token_ids: TokenArray


@dataclass(slots=True)
class PoolState:
    """The parts of a pool. `sequences` are in the order in which they were opened.

    While something is `left_over`, columns, tables and index lack it: `catch_up` comes before
    everything that reads or changes them.
    """

    spec: PoolSpec
    model_version: str
    draining: bool
    columns: SequenceColumns
    log: StepLog
    order: FreeOrder
    claims: Claims
    digests: DigestWork
    events: EventLog
    index: PrefixIndex
    twins: Twins
    windows: WindowGroups
    supply: Supply
    statistics: Statistics
    sequences: dict[Handle, Sequence]
    handles: dict[SequenceId, Handle] = field(default_factory=dict)
    rows: HandleRows = field(default_factory=HandleRows)
    preempted_counts: dict[SequenceId, int] = field(default_factory=dict)
    left_over: DecodedBatch | OpenedSequence | None = None

    @property
    def held_block_count(self) -> int:
        """Blocks that stand in a table."""
        order = self.order
        return self.spec.block_count - 1 - order.plain_count - order.cached_count

    @property
    def published_block_count(self) -> int:
        """Indexed blocks that are written, of all groups."""
        return self.index.published_count + self.windows.index.published_count

    @property
    def pending_block_count(self) -> int:
        """Indexed blocks that are not written yet, of all groups."""
        return self.index.pending_count + self.windows.index.pending_count


def build_state(spec: PoolSpec, hasher: Hasher, *, event_bytes_kept_max: int) -> PoolState:
    """Wire the parts of an empty pool."""
    columns = SequenceColumns(spec.block_size)
    log = StepLog(columns)
    policy = EVICTION_POLICIES[spec.eviction_policy]()
    order = FreeOrder(spec.block_count, band_count=policy.band_count)
    claims = Claims(policy, order)
    block_bytes = spec.block_size * TOKEN_BYTES
    digests = DigestWork(hasher, block_bytes=block_bytes)
    accounts = [digest_accounts(hasher.algorithm) for _ in spec.groups]
    events = EventLog(
        digests, accounts, block_bytes=block_bytes, bytes_kept_max=event_bytes_kept_max
    )
    index = PrefixIndex(order, claims, digests, events, block_size=spec.block_size)
    statistics = Statistics()
    sequences: dict[Handle, Sequence] = {}
    twins = Twins(index, order, columns, log, sequences, merge_duplicates=spec.merge_duplicates)
    window_index = WindowIndex(WindowDigests(hasher), events, block_bytes=block_bytes)
    window_twins = WindowTwins(
        window_index, order, claims, sequences, merge_duplicates=spec.merge_duplicates
    )
    windows = WindowGroups(spec, window_index, window_twins, order, claims, columns, log)
    return PoolState(
        spec=spec,
        model_version=spec.model_version,
        draining=False,
        columns=columns,
        log=log,
        order=order,
        claims=claims,
        digests=digests,
        events=events,
        index=index,
        twins=twins,
        windows=windows,
        supply=Supply(order, claims, index, twins, windows, statistics),
        statistics=statistics,
        sequences=sequences,
    )
