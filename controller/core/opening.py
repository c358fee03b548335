"""Opening and closing sequences."""

from prefixd.controller.core.awaiting import find_awaited
from prefixd.controller.core.errors import Draining, SequenceNotFound
from prefixd.controller.core.forking import check_names
from prefixd.controller.core.identity import SequenceKeys, sequence_keys
from prefixd.controller.core.match import Match
from prefixd.controller.core.matching import find_prefix
from prefixd.controller.core.messages import (
    AwaitPrefix,
    CloseEntry,
    CloseOutcome,
    CloseReason,
    OpenEntry,
    OpenOutcome,
)
from prefixd.controller.core.node import Lane
from prefixd.controller.core.scheduling import Demand, allot, grant
from prefixd.controller.core.sequences import Sequence, pack_tokens
from prefixd.controller.core.state import PREEMPTED_MAX, OpenedSequence, PoolState, StepContext
from prefixd.controller.core.window_blocks import WindowBlock


def open_sequence(
    state: PoolState, step: StepContext, entry: OpenEntry
) -> OpenOutcome | AwaitPrefix:
    """Begin a sequence: match its prefix, take blocks, schedule tokens.

    Raises SequenceExists, Draining, LimitExceeded or as `allot`, and has changed nothing then.
    """
    check_names(state, handle=entry.handle, sequence_id=entry.sequence_id)
    if state.draining:
        raise Draining("the pool is draining")
    block_size = state.spec.block_size
    token_count = len(entry.token_ids)
    keys = sequence_keys(entry.identity, model_version=state.model_version, block_size=block_size)
    packed_tokens = pack_tokens(entry.token_ids)
    uncacheable = state.spec.caching_disabled or entry.identity.has_unknown_fields
    match = Match(start_block=0)
    if not uncacheable and not entry.skip_cache_read:
        match = find_prefix(state, keys, packed_tokens, step_id=step.step_id)
        if entry.await_token_count_min > 0:
            awaiting = find_awaited(state, keys, packed_tokens, match, step_id=step.step_id)
            if awaiting is not None and (
                awaiting.awaitable_token_count >= entry.await_token_count_min
            ):
                return awaiting
    allotment = allot(
        state,
        step,
        Demand(
            start_token=0,
            end_token=token_count,
            token_count_max=entry.schedule_token_count_max,
            lookahead_slot_count=entry.lookahead_slot_count,
            must_fit_token_count=entry.must_fit_token_count,
            table_block_count=0,
            match=match,
        ),
    )
    match = allotment.match
    sequence = _add_sequence(state, entry, keys)
    sequence.uncacheable = uncacheable
    state.columns.written[sequence.row] = match.published_count * block_size
    sequence.cached_count = match.token_count(block_size)
    _count(state, sequence, token_count)
    _count_hit_ages(state, step, match)
    plan = grant(state, step, sequence, allotment)
    state.left_over = OpenedSequence(step.step_id, sequence, entry.token_ids)
    published_count = match.published_token_count(block_size)
    return OpenOutcome(plan, published_count, sequence.cached_count - published_count)


def _add_sequence(state: PoolState, entry: OpenEntry, keys: SequenceKeys) -> Sequence:
    row = state.columns.take_row()
    state.log.begin_row(row)
    sequence = Sequence(
        keys,
        handle=entry.handle,
        sequence_id=entry.sequence_id,
        identity=entry.identity,
        row=row,
        model_version=state.model_version,
    )
    sequence.preemption_count = entry.preemption_count
    sequence.skip_cache_read = entry.skip_cache_read
    sequence.retention_hint = entry.retention_hint
    state.windows.open(sequence)
    state.sequences[entry.handle] = sequence
    state.handles[entry.sequence_id] = entry.handle
    state.rows[entry.handle] = row
    return sequence


def _count(state: PoolState, sequence: Sequence, token_count: int) -> None:
    scheduled_count = state.preempted_counts.pop(sequence.sequence_id, 0)
    if sequence.uncacheable or sequence.skip_cache_read:
        return
    statistics = state.statistics
    hit_count = sequence.cached_count
    if sequence.preemption_count == 0:
        statistics.count_open(query_token_count=token_count, hit_token_count=hit_count)
        return
    statistics.count_reopen(query_token_count=token_count, hit_token_count=hit_count)
    sequence.recomputed_count = max(0, min(scheduled_count, token_count) - hit_count)
    statistics.recomputed_token_count += sequence.recomputed_count


def _count_hit_ages(state: PoolState, step: StepContext, match: Match) -> None:
    hits: list[tuple[Lane | WindowBlock, int]] = [
        (node.lane, match.last_count if node is match.path[-1] else node.block_count)
        for node in match.path
    ]
    for blocks in match.window_blocks.values():
        hits += [(block, 1) for block in blocks.values()]
    if match.partial is not None:
        hits.append((match.partial.node.lane, 1))
        hits += [(block, 1) for block in match.partial.window_sources.values()]
    for run, block_count in hits:
        state.statistics.age_at_hit.add(
            age_ms=step.now_ms - run.last_use_ms if run.is_linked else 0, block_count=block_count
        )


def close_sequence(state: PoolState, step: StepContext, entry: CloseEntry) -> CloseOutcome:
    """End a sequence and take its blocks back (S17). Raises SequenceNotFound."""
    sequence = state.sequences.get(entry.handle)
    if sequence is None:
        raise SequenceNotFound(
            f"no open sequence has handle {entry.handle}", numbers={"handle": entry.handle}
        )
    columns = state.columns
    row = sequence.row
    if entry.reason is CloseReason.PREEMPTED:
        while len(state.preempted_counts) >= PREEMPTED_MAX:
            del state.preempted_counts[next(iter(state.preempted_counts))]
        state.preempted_counts[sequence.sequence_id] = int(columns.scheduled[row])
    del state.sequences[entry.handle]
    del state.handles[sequence.sequence_id]
    del state.rows[entry.handle]
    state.claims.close(
        sequence,
        sequence.retention_hint if entry.retention_hint is None else entry.retention_hint,
        reason=entry.reason,
        now_ms=step.now_ms,
    )
    state.supply.release(
        sequence,
        now_ms=step.now_ms,
        step_id=step.step_id,
        is_read=bool(columns.planned_step_id[row] == step.step_id),
    )
    columns.give_row(row)
    return CloseOutcome()
