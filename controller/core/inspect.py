"""Frozen views of a pool for operators; reading them changes nothing.

Listings are paged by id: they return at most `count` rows behind the given one.
"""

from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest

import numpy as np
import numpy.typing as npt

from prefixd.controller.core.block_map import BlockMap, block_map, start_block
from prefixd.controller.core.errors import BlockNotFound, SequenceNotFound
from prefixd.controller.core.messages import (
    BlockHash,
    BlockId,
    Handle,
    Identity,
    IntArray,
    SequenceId,
    StepId,
)
from prefixd.controller.core.node import Node
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.statistics import AGE_BOUNDS_MS, AgeHistogram
from prefixd.controller.core.window_blocks import WindowBlock


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
    """A block; the hashes are None unless it is published, the parent's for a first block.

    A pending block stands in no digest answer (S10); `block_index` is None outside the index.
    """

    block_id: BlockId
    state: BlockState
    content: BlockContent
    holder_count: int
    block_hash: BlockHash | None
    parent_hash: BlockHash | None
    block_index: int | None
    group_index: int = 0


def pool_view(pool: Pool) -> PoolView:
    """Return a pool's accounts and counters."""
    state = pool.state
    return PoolView(
        revision=pool.revision,
        model_version=pool.model_version,
        draining=pool.draining,
        free_block_count=state.order.plain_count,
        evictable_block_count=state.order.cached_count,
        held_block_count=state.held_block_count,
        published_block_count=state.published_block_count,
        pending_block_count=state.pending_block_count,
        sequence_count=pool.sequence_count,
        applied_step_id=pool.applied_step_id,
        executed_step_id=pool.executed_step_id,
        statistics=_statistics(pool),
    )


def _statistics(pool: Pool) -> StatisticsView:
    state = pool.state
    statistics = state.statistics
    return StatisticsView(
        sequence_count=statistics.sequence_count,
        query_token_count=statistics.query_token_count,
        hit_token_count=statistics.hit_token_count,
        preempted_sequence_count=statistics.preempted_sequence_count,
        preempted_query_token_count=statistics.preempted_query_token_count,
        preempted_hit_token_count=statistics.preempted_hit_token_count,
        recent_hit_rate=statistics.recent_hit_rate,
        evicted_block_count=statistics.evicted_block_count,
        recomputed_token_count=statistics.recomputed_token_count,
        usage=state.held_block_count / (state.spec.block_count - 1),
        age_at_eviction=_histogram(statistics.age_at_eviction),
        age_at_hit=_histogram(statistics.age_at_hit),
    )


def _histogram(histogram: AgeHistogram) -> AgeHistogramView:
    return AgeHistogramView(AGE_BOUNDS_MS, tuple(histogram.block_counts))


def sequences(pool: Pool, *, after: str, count: int) -> tuple[SequenceView, ...]:
    """List open sequences with ids above `after` ("" for the first page), by id."""
    ids = nsmallest(count, (name for name in pool.state.handles if name > after))
    return tuple(sequence(pool, sequence_id) for sequence_id in ids)


def _open_sequence(pool: Pool, sequence_id: str) -> Sequence:
    handle = pool.state.handles.get(SequenceId(sequence_id))
    if handle is None:
        raise SequenceNotFound(f"no open sequence is named {sequence_id!r}")
    return pool.state.sequences[handle]


def sequence(pool: Pool, sequence_id: str) -> SequenceView:
    """Return one sequence. Raises SequenceNotFound."""
    found = _open_sequence(pool, sequence_id)
    columns = pool.state.columns
    row = found.row
    return SequenceView(
        sequence_id=found.sequence_id,
        handle=found.handle,
        known_count=int(columns.known[row]),
        scheduled_count=int(columns.scheduled[row]),
        written_count=int(columns.written[row]),
        cached_count=found.cached_count,
        block_count=found.block_count,
        identity=found.identity,
        preemption_count=found.preemption_count,
        uncacheable=found.uncacheable,
        recomputed_token_count=found.recomputed_count,
        model_version=found.model_version,
        cut=bool(columns.cut[row]),
    )


def block_tables(pool: Pool, sequence_id: str) -> tuple[IntArray, ...]:
    """Return a sequence's block tables, one per KV group. Raises SequenceNotFound."""
    found = _open_sequence(pool, sequence_id)
    windows = found.window_tables.values()
    return (found.table(), *(np.array(table.block_ids(), dtype=np.int64) for table in windows))


def blocks(
    pool: Pool, *, after: int, count: int, state: BlockState | None = None
) -> tuple[BlockView, ...]:
    """List blocks with ids above `after` (0 for the first page), by id, of one state or all."""
    overview = block_map(pool)
    starts: dict[Node, int] = {}
    candidates = np.arange(max(after, 0) + 1, pool.spec.block_count)
    if state is not None:
        candidates = candidates[_is_in_state(overview, state)[candidates]]
    return tuple(
        _block_view(pool, overview, int(block_id), starts) for block_id in candidates[:count]
    )


def _is_in_state(overview: BlockMap, state: BlockState) -> npt.NDArray[np.bool_]:
    is_held = overview.holder_count > 0
    if state is BlockState.HELD:
        return is_held
    is_indexed = overview.node_at > 0
    for block_id, block in overview.windows.items():
        is_indexed[block_id] = block.place is not None
    return ~is_held & (is_indexed if state is BlockState.EVICTABLE else ~is_indexed)


def _block_view(
    pool: Pool, overview: BlockMap, block_id: int, starts: dict[Node, int]
) -> BlockView:
    holder_count = int(overview.holder_count[block_id])
    at = int(overview.node_at[block_id]) - 1
    if block_id in overview.windows:
        return _window_view(pool, overview.windows[block_id])
    if at < 0:
        return BlockView(
            block_id=BlockId(block_id),
            state=BlockState.HELD if holder_count else BlockState.FREE,
            content=BlockContent.PRIVATE,
            holder_count=holder_count,
            block_hash=None,
            parent_hash=None,
            block_index=None,
        )
    node = overview.nodes[at]
    offset = int(overview.offset[block_id])
    is_published = offset < node.lane.published_count
    return BlockView(
        block_id=BlockId(block_id),
        state=BlockState.HELD if holder_count else BlockState.EVICTABLE,
        content=BlockContent.PUBLISHED if is_published else BlockContent.PENDING,
        holder_count=holder_count,
        block_hash=pool.digests.digest(node, offset) if is_published else None,
        parent_hash=pool.digests.parent_digest(node, offset) if is_published else None,
        block_index=start_block(node, starts) + offset,
    )


def _window_view(pool: Pool, block: WindowBlock) -> BlockView:
    index = pool.state.windows.index
    state = BlockState.HELD if block.holder_count else BlockState.EVICTABLE
    place = block.place
    if place is None:
        return BlockView(
            block_id=block.block_id,
            state=state,
            content=BlockContent.PRIVATE,
            holder_count=block.holder_count,
            block_hash=None,
            parent_hash=None,
            block_index=None,
            group_index=block.group_index,
        )
    is_published = index.is_published(block)
    return BlockView(
        block_id=block.block_id,
        state=state,
        content=BlockContent.PUBLISHED if is_published else BlockContent.PENDING,
        holder_count=block.holder_count,
        block_hash=index.digests.digest(place) if is_published else None,
        parent_hash=index.digests.parent_digest(place) if is_published else None,
        block_index=place.depth - 1,
        group_index=block.group_index,
    )


def block(pool: Pool, block_id: int) -> BlockView:
    """Return one block. Raises BlockNotFound unless 1 <= block_id < block_count."""
    _check_block_id(pool, block_id)
    return _block_view(pool, block_map(pool), block_id, {})


def _check_block_id(pool: Pool, block_id: int) -> None:
    if not 1 <= block_id < pool.spec.block_count:
        raise BlockNotFound(
            f"block {block_id} is not in 1..{pool.spec.block_count - 1}",
            numbers={"block_id": block_id, "block_count": pool.spec.block_count},
        )


def holders(pool: Pool, block_id: int, *, count: int) -> tuple[SequenceId, ...]:
    """Return the ids of at most `count` sequences whose tables have the block, by id.

    Raises BlockNotFound unless 1 <= block_id < block_count.
    """
    _check_block_id(pool, block_id)
    names = (
        found.sequence_id
        for found in pool.state.sequences.values()
        if block_id in found.table()
        or any(block_id in table.block_ids() for table in found.window_tables.values())
    )
    return tuple(nsmallest(count, names))


def free_order(pool: Pool) -> IntArray:
    """Return the free and evictable blocks in the order in which they would be handed out."""
    return np.array(pool.state.order.block_ids(), dtype=np.int64)
