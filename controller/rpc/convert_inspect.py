"""Views of pools, sequences and blocks: core to protobuf."""

from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.inspect import (
    AgeHistogramView,
    BlockContent,
    BlockState,
    BlockView,
    PoolView,
    SequenceView,
    StatisticsView,
)
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.registry import Lease
from prefixd.controller.rpc.convert_identity import identity_message
from prefixd.controller.rpc.convert_pool import duration_message, group_message
from prefixd.v1 import inspect_pb2

STATE_VALUES = {
    BlockState.FREE: inspect_pb2.BLOCK_STATE_FREE,
    BlockState.EVICTABLE: inspect_pb2.BLOCK_STATE_EVICTABLE,
    BlockState.HELD: inspect_pb2.BLOCK_STATE_HELD,
}
STATES = {value: state for state, value in STATE_VALUES.items()}
CONTENT_VALUES = {
    BlockContent.PRIVATE: inspect_pb2.BLOCK_CONTENT_PRIVATE,
    BlockContent.PENDING: inspect_pb2.BLOCK_CONTENT_PENDING,
    BlockContent.PUBLISHED: inspect_pb2.BLOCK_CONTENT_PUBLISHED,
}


def pool_message(pool: Pool, view: PoolView, lease: Lease) -> inspect_pb2.Pool:
    """Converts a pool's accounts."""
    spec = pool.spec
    message = inspect_pb2.Pool(
        pool_name=spec.pool_name,
        model_name=spec.model_name,
        model_version=view.model_version,
        epoch=pool.epoch,
        revision=view.revision,
        block_count=spec.block_count,
        block_size=spec.block_size,
        free_block_count=view.free_block_count,
        evictable_block_count=view.evictable_block_count,
        held_block_count=view.held_block_count,
        sequence_count=view.sequence_count,
        applied_step_id=view.applied_step_id,
        executed_step_id=view.executed_step_id,
        groups=[group_message(group) for group in spec.groups],
        statistics=statistics_message(view.statistics),
        session_active=lease.session_active,
        draining=view.draining,
        caching_disabled=spec.caching_disabled,
        lease=duration_message(lease.lease_ms),
        kv_format=spec.kv_format,
        worker_address=spec.worker_address,
        vocabulary_size=spec.vocabulary_size,
        published_block_count=view.published_block_count,
        pending_block_count=view.pending_block_count,
        sub_block_reuse=spec.sub_block_reuse,
        merge_duplicates=spec.merge_duplicates,
        eviction_policy=spec.eviction_policy,
    )
    if lease.left_ms is not None:
        message.lease_left.CopyFrom(duration_message(lease.left_ms))
    return message


def statistics_message(view: StatisticsView) -> inspect_pb2.PoolStatistics:
    """Converts a pool's counters."""
    return inspect_pb2.PoolStatistics(
        sequence_count=view.sequence_count,
        query_token_count=view.query_token_count,
        hit_token_count=view.hit_token_count,
        preempted_sequence_count=view.preempted_sequence_count,
        preempted_query_token_count=view.preempted_query_token_count,
        preempted_hit_token_count=view.preempted_hit_token_count,
        recent_hit_rate=view.recent_hit_rate,
        evicted_block_count=view.evicted_block_count,
        recomputed_token_count=view.recomputed_token_count,
        usage=view.usage,
        age_at_eviction=_histogram(view.age_at_eviction),
        age_at_hit=_histogram(view.age_at_hit),
    )


def sequence_message(view: SequenceView) -> inspect_pb2.Sequence:
    """Converts a sequence."""
    return inspect_pb2.Sequence(
        sequence_id=view.sequence_id,
        handle=view.handle,
        known_count=view.known_count,
        scheduled_count=view.scheduled_count,
        written_count=view.written_count,
        cached_count=view.cached_count,
        block_count=view.block_count,
        identity=identity_message(view.identity),
        preemption_count=view.preemption_count,
        uncacheable=view.uncacheable,
        recomputed_token_count=view.recomputed_token_count,
        model_version=view.model_version,
        cut=view.cut,
    )


def block_message(view: BlockView) -> inspect_pb2.Block:
    """Converts a block."""
    return inspect_pb2.Block(
        block_id=view.block_id,
        state=STATE_VALUES[view.state],
        content=CONTENT_VALUES[view.content],
        holder_count=view.holder_count,
        hash_hex="" if view.block_hash is None else view.block_hash.hex(),
        parent_hash_hex="" if view.parent_hash is None else view.parent_hash.hex(),
        block_index=view.block_index or 0,
        group_index=view.group_index,
    )


def block_state(value: inspect_pb2.BlockState.ValueType) -> BlockState | None:
    """Converts the filter of a block listing; None: all. Raises FieldInvalid."""
    if value == inspect_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    state = STATES.get(value)
    if state is None:
        raise FieldInvalid(f"state must be a known state, not {value}", field="state")
    return state


def _histogram(view: AgeHistogramView) -> inspect_pb2.AgeHistogram:
    return inspect_pb2.AgeHistogram(
        upper_bounds_ms=view.upper_bounds_ms, block_counts=view.block_counts
    )
