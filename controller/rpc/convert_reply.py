"""Replies to steps: core to protobuf."""

from prefixd.controller.core.messages import (
    AwaitPrefix,
    BlockCopy,
    CloseOutcome,
    DecodeOutcome,
    ExtendOutcome,
    ForkOutcome,
    GroupPlan,
    OpenOutcome,
    Outcome,
    Refusal,
    SequencePlan,
    StepReply,
    TokenRange,
)
from prefixd.v1 import cache_pb2, errors_pb2, types_pb2


def step_message(reply: StepReply) -> cache_pb2.StepResponse:
    """Converts a reply. Columns travel as Python lists: upb copies those fastest."""
    return cache_pb2.StepResponse(
        step_id=reply.step_id,
        outcomes=[_outcome(outcome) for outcome in reply.outcomes],
        cut_sequences=[
            cache_pb2.CutSequence(
                handle=cut.handle,
                known_count=cut.known_count,
                scheduled_count=cut.scheduled_count,
            )
            for cut in reply.cut_sequences
        ],
        available_block_count=reply.available_block_count,
    )


def reason_value(reason: str) -> errors_pb2.ErrorReason.ValueType:
    """Finds the protocol's value of a reason's name. KeyError: the core uses an unknown name."""
    return errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")


def _outcome(outcome: Outcome) -> cache_pb2.EntryOutcome:
    match outcome:
        case DecodeOutcome():
            return cache_pb2.EntryOutcome(decode=_decode(outcome))
        case ExtendOutcome(plan=plan):
            return cache_pb2.EntryOutcome(extend=cache_pb2.ExtendOutcome(plan=_plan(plan)))
        case OpenOutcome(plan=plan):
            return cache_pb2.EntryOutcome(
                open=cache_pb2.OpenOutcome(
                    plan=_plan(plan),
                    published_token_count=outcome.published_token_count,
                    pending_token_count=outcome.pending_token_count,
                )
            )
        case CloseOutcome():
            return cache_pb2.EntryOutcome(close=cache_pb2.CloseOutcome())
        case Refusal():
            return cache_pb2.EntryOutcome(
                refusal=cache_pb2.Refusal(
                    reason=reason_value(outcome.reason),
                    message=outcome.message,
                    numbers=dict(outcome.numbers),
                )
            )
        case AwaitPrefix():
            return cache_pb2.EntryOutcome(
                await_prefix=cache_pb2.AwaitPrefix(
                    published_token_count=outcome.published_token_count,
                    pending_token_count=outcome.pending_token_count,
                    awaitable_token_count=outcome.awaitable_token_count,
                    handle=outcome.handle,
                )
            )
        case ForkOutcome(plan=plan):
            return cache_pb2.EntryOutcome(fork=cache_pb2.ForkOutcome(plan=_plan(plan)))


def _plan(plan: SequencePlan) -> cache_pb2.SequencePlan:
    return cache_pb2.SequencePlan(
        handle=plan.handle,
        cached=_range(plan.cached),
        scheduled=_range(plan.scheduled),
        groups=[_group(group) for group in plan.groups],
        copies=[_copy(copy) for copy in plan.copies],
    )


def _group(group: GroupPlan) -> cache_pb2.GroupPlan:
    return cache_pb2.GroupPlan(
        start_block=group.start_block,
        block_ids=group.block_ids.tolist(),
        slots=types_pb2.SlotRuns(
            first_slots=group.slots.first_slots.tolist(),
            slot_counts=group.slots.slot_counts.tolist(),
        ),
    )


def _decode(outcome: DecodeOutcome) -> cache_pb2.DecodeOutcome:
    return cache_pb2.DecodeOutcome(
        new_blocks=[
            cache_pb2.BlockColumn(block_ids=column.tolist()) for column in outcome.new_block_ids
        ],
        deferred_rows=[
            cache_pb2.DeferredRow(
                row=deferred.row,
                reason=reason_value(deferred.reason),
                needed_count=deferred.needed_count,
                available_count=deferred.available_count,
            )
            for deferred in outcome.deferred_rows
        ],
        copies=[_copy(copy) for copy in outcome.copies],
    )


def _range(tokens: TokenRange) -> types_pb2.TokenRange:
    return types_pb2.TokenRange(start_token=tokens.start_token, end_token=tokens.end_token)


def _copy(copy: BlockCopy) -> types_pb2.BlockCopy:
    return types_pb2.BlockCopy(
        handle=copy.handle,
        group_index=copy.group_index,
        source_block_id=copy.source_block_id,
        target_block_id=copy.target_block_id,
        token_count=copy.token_count,
    )
