"""Adding known tokens to a sequence and scheduling more of its positions."""

from prefixd.controller.core import limits
from prefixd.controller.core.completion import complete_blocks
from prefixd.controller.core.copying import note_tail, shared_tail
from prefixd.controller.core.errors import LimitExceeded, PositionMismatch, SequenceNotFound
from prefixd.controller.core.match import Match
from prefixd.controller.core.matching import find_prefix
from prefixd.controller.core.messages import ExtendEntry, ExtendOutcome
from prefixd.controller.core.scheduling import Demand, allot, grant
from prefixd.controller.core.sequences import Sequence, pack_tokens
from prefixd.controller.core.state import PoolState, StepContext


def extend_sequence(state: PoolState, step: StepContext, entry: ExtendEntry) -> ExtendOutcome:
    """Add tokens and schedule positions; after a failed step, match the lost prefix first.

    Raises SequenceNotFound, PositionMismatch, LimitExceeded or as `allot`, and has changed nothing
    then.
    """
    sequence = state.sequences.get(entry.handle)
    if sequence is None:
        raise SequenceNotFound(
            f"no open sequence has handle {entry.handle}", numbers={"handle": entry.handle}
        )
    columns = state.columns
    row = sequence.row
    _check_positions(state, sequence, entry)
    known_count = int(columns.known[row]) + len(entry.token_ids)
    if known_count > limits.TOKENS_PER_SEQUENCE_MAX:
        raise LimitExceeded(
            f"the sequence would have {known_count} tokens, more than"
            f" {limits.TOKENS_PER_SEQUENCE_MAX}",
            numbers={
                "token_count": known_count,
                "tokens_per_sequence_max": limits.TOKENS_PER_SEQUENCE_MAX,
            },
        )
    start = int(columns.scheduled[row])
    if entry.rollback_to_token_count is not None:
        start = entry.rollback_to_token_count
    match = _lost_prefix(state, step, sequence, entry)
    allotment = allot(
        state,
        step,
        Demand(
            start_token=start,
            end_token=known_count + entry.draft_token_count,
            token_count_max=entry.schedule_token_count_max,
            lookahead_slot_count=entry.lookahead_slot_count,
            must_fit_token_count=0,
            table_block_count=sequence.block_count,
            match=match,
            shared_tail=shared_tail(state, sequence, position=start),
            sequence=sequence,
        ),
    )
    if entry.rollback_to_token_count is not None:
        _roll_back(state, row, position=start)
    if columns.cut[row]:
        _resume(state, sequence, allotment.match)
    columns.add_tokens(sequence, entry.token_ids)
    plan = grant(state, step, sequence, allotment)
    complete_blocks(state, sequence, step.step_id)
    note_tail(state, sequence)
    return ExtendOutcome(plan)


def _check_positions(state: PoolState, sequence: Sequence, entry: ExtendEntry) -> None:
    known_count = int(state.columns.known[sequence.row])
    scheduled_count = int(state.columns.scheduled[sequence.row])
    if (entry.known_count_before, entry.scheduled_count_before) != (known_count, scheduled_count):
        raise PositionMismatch(
            f"sequence {sequence.sequence_id!r} has {known_count} tokens known and"
            f" {scheduled_count} scheduled, not {entry.known_count_before} and"
            f" {entry.scheduled_count_before}",
            numbers={"known_count": known_count, "scheduled_count": scheduled_count},
        )


def _lost_prefix(
    state: PoolState, step: StepContext, sequence: Sequence, entry: ExtendEntry
) -> Match:
    """Match what a cut sequence lost, as an open would; empty for any other."""
    start_block = sequence.indexed_count
    if not state.columns.cut[sequence.row] or sequence.uncacheable or sequence.skip_cache_read:
        return Match(start_block)
    packed_tokens = state.columns.known_tokens(sequence) + pack_tokens(entry.token_ids)
    return find_prefix(
        state,
        sequence.keys,
        packed_tokens,
        step_id=step.step_id,
        start_block=start_block,
        leaf=sequence.leaf,
    )


def _roll_back(state: PoolState, row: int, *, position: int) -> None:
    columns = state.columns
    columns.scheduled[row] = position
    columns.written[row] = min(int(columns.written[row]), position)
    state.log.rewind(row, position=position)


def _resume(state: PoolState, sequence: Sequence, match: Match) -> None:
    """Let a cut sequence go on behind what it matched again."""
    columns = state.columns
    row = sequence.row
    block_size = state.spec.block_size
    columns.cut[row] = False
    start_count = sequence.indexed_count * block_size + match.token_count(block_size)
    published_count = (sequence.indexed_count + match.published_count) * block_size
    columns.written[row] = max(int(columns.written[row]), published_count)
    recomputed_count = max(0, sequence.lost_count - start_count)
    sequence.lost_count = 0
    sequence.recomputed_count += recomputed_count
    state.statistics.recomputed_token_count += recomputed_count
