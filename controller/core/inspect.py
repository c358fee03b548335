"""Frozen views of a pool for operators; reading them changes nothing.

Listings are paged by id: they return at most `count` rows behind the given one.
"""

from dataclasses import dataclass
from enum import Enum

from prefixd.controller.core.messages import (
    BlockHash,
    BlockId,
    Handle,
    Identity,
    IntArray,
    SequenceId,
    StepId,
)
from prefixd.controller.core.pool import Pool


class BlockState(Enum):
    """Whether a block may be handed out, and what would be lost."""

    FREE = "free"
    EVICTABLE = "evictable"
    HELD = "held"


class BlockContent(Enum):
    """Whether a block's content can be matched."""

    PRIVATE = "private"
    PENDING = "pending"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class AgeHistogramView:
    """Blocks by age: counts[i] were younger than upper_bounds_ms[i]; the last has no bound."""

    upper_bounds_ms: tuple[int, ...]
    block_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatisticsView:
    """Counters since registration (S24); tokens unless the name says blocks or sequences."""

    sequence_count: int
    query_token_count: int
    hit_token_count: int
    preempted_sequence_count: int
    preempted_query_token_count: int
    preempted_hit_token_count: int
    recent_hit_rate: float
    evicted_block_count: int
    recomputed_token_count: int
    usage: float
    age_at_eviction: AgeHistogramView
    age_at_hit: AgeHistogramView


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool's accounts: free + evictable + held = block_count - 1."""

    revision: int
    model_version: str
    draining: bool
    free_block_count: int
    evictable_block_count: int
    held_block_count: int
    published_block_count: int
    pending_block_count: int
    sequence_count: int
    applied_step_id: StepId
    executed_step_id: StepId
    statistics: StatisticsView


@dataclass(frozen=True, slots=True)
class SequenceView:
    """An open sequence and its positions."""

    sequence_id: SequenceId
    handle: Handle
    known_count: int
    scheduled_count: int
    written_count: int
    cached_count: int
    block_count: int
    identity: Identity
    preemption_count: int
    uncacheable: bool
    recomputed_token_count: int
    model_version: str
    cut: bool


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block; the hashes are None unless it is in the index, the parent's for a first block."""

    block_id: BlockId
    state: BlockState
    content: BlockContent
    holder_count: int
    block_hash: BlockHash | None
    parent_hash: BlockHash | None
    block_index: int | None


def pool_view(pool: Pool) -> PoolView:
    """Return a pool's accounts and counters."""
    raise NotImplementedError


def sequences(pool: Pool, *, after: str, count: int) -> tuple[SequenceView, ...]:
    """List open sequences with ids above `after` ("" for the first page), by id."""
    raise NotImplementedError


def sequence(pool: Pool, sequence_id: str) -> SequenceView:
    """Return one sequence. Raises SequenceNotFound."""
    raise NotImplementedError


def block_tables(pool: Pool, sequence_id: str) -> tuple[IntArray, ...]:
    """Return a sequence's block tables, one per KV group. Raises SequenceNotFound."""
    raise NotImplementedError


def blocks(
    pool: Pool, *, after: int, count: int, state: BlockState | None = None
) -> tuple[BlockView, ...]:
    """List blocks with ids above `after` (0 for the first page), by id, of one state or all."""
    raise NotImplementedError


def block(pool: Pool, block_id: int) -> BlockView:
    """Return one block. Raises BlockNotFound unless 1 <= block_id < block_count."""
    raise NotImplementedError


def holders(pool: Pool, block_id: int, *, count: int) -> tuple[SequenceId, ...]:
    """Return the ids of at most `count` sequences whose tables have the block, by id."""
    raise NotImplementedError


def free_order(pool: Pool) -> IntArray:
    """Return the free and evictable blocks in the order in which they would be handed out."""
    raise NotImplementedError
