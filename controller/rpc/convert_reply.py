"""Replies to steps: core to protobuf.

Messages are filled in place: a message given to another's constructor would be copied, once per
level.
"""

from collections.abc import Iterable

from prefixd.controller.core.messages import (
    AwaitPrefix,
    BlockCopy,
    CloseOutcome,
    DecodeOutcome,
    ExtendOutcome,
    ForkOutcome,
    FreedBlock,
    OpenOutcome,
    Outcome,
    Refusal,
    SequencePlan,
    StepReply,
)
from prefixd.controller.rpc.packed import PackedColumn
from prefixd.v1 import cache_pb2, errors_pb2, types_pb2

APPENDED_BLOCK_IDS = PackedColumn(cache_pb2.GroupPlan, "block_ids")
NEW_BLOCK_IDS = PackedColumn(cache_pb2.BlockColumn, "block_ids")
FIRST_SLOTS = PackedColumn(types_pb2.SlotRuns, "first_slots")
SLOT_COUNTS = PackedColumn(types_pb2.SlotRuns, "slot_counts")


def session_message(reply: StepReply) -> cache_pb2.SessionResponse:
    """Converts a reply to the message that carries it on a session."""
    message = cache_pb2.SessionResponse()
    _fill_step(message.step, reply)
    return message


def _fill_step(message: cache_pb2.StepResponse, reply: StepReply) -> None:
    message.step_id = reply.step_id
    message.available_block_count = reply.available_block_count
    for outcome in reply.outcomes:
        _fill_outcome(message.outcomes.add(), outcome)
    for cut in reply.cut_sequences:
        message.cut_sequences.add(
            handle=cut.handle,
            known_count=cut.known_count,
            scheduled_count=cut.scheduled_count,
        )
    for remap in reply.remaps:
        message.remaps.add(
            handle=remap.handle,
            group_index=remap.group_index,
            block_index=remap.block_index,
            old_block_id=remap.old_block_id,
            new_block_id=remap.new_block_id,
        )


def reason_value(reason: str) -> errors_pb2.ErrorReason.ValueType:
    """Finds the protocol's value of a reason's name. ValueError: the core uses an unknown name."""
    return errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")


def _fill_outcome(message: cache_pb2.EntryOutcome, outcome: Outcome) -> None:
    match outcome:
        case DecodeOutcome():
            _fill_decode(message.decode, outcome)
        case ExtendOutcome():
            _fill_plan(message.extend.plan, outcome.plan)
        case OpenOutcome():
            _fill_plan(message.open.plan, outcome.plan)
            message.open.published_token_count = outcome.published_token_count
            message.open.pending_token_count = outcome.pending_token_count
        case CloseOutcome():
            message.close.SetInParent()
        case Refusal():
            message.refusal.reason = reason_value(outcome.reason)
            message.refusal.message = outcome.message
            message.refusal.numbers.update(outcome.numbers)
        case AwaitPrefix():
            message.await_prefix.published_token_count = outcome.published_token_count
            message.await_prefix.pending_token_count = outcome.pending_token_count
            message.await_prefix.awaitable_token_count = outcome.awaitable_token_count
            message.await_prefix.handle = outcome.handle
        case ForkOutcome():
            _fill_plan(message.fork.plan, outcome.plan)


def _fill_plan(message: cache_pb2.SequencePlan, plan: SequencePlan) -> None:
    message.handle = plan.handle
    message.cached.start_token = plan.cached.start_token
    message.cached.end_token = plan.cached.end_token
    message.scheduled.start_token = plan.scheduled.start_token
    message.scheduled.end_token = plan.scheduled.end_token
    for group in plan.groups:
        group_message = message.groups.add(start_block=group.start_block)
        APPENDED_BLOCK_IDS.append(group_message, group.block_ids)
        FIRST_SLOTS.append(group_message.slots, group.slots.first_slots)
        SLOT_COUNTS.append(group_message.slots, group.slots.slot_counts)
    _fill_copies(message, plan.copies)
    _fill_freed(message, plan.freed_blocks)


def _fill_decode(message: cache_pb2.DecodeOutcome, outcome: DecodeOutcome) -> None:
    for column in outcome.new_block_ids:
        NEW_BLOCK_IDS.append(message.new_blocks.add(), column)
    for deferred in outcome.deferred_rows:
        message.deferred_rows.add(
            row=deferred.row,
            reason=reason_value(deferred.reason),
            needed_count=deferred.needed_count,
            available_count=deferred.available_count,
        )
    _fill_copies(message, outcome.copies)
    _fill_freed(message, outcome.freed_blocks)


def _fill_copies(
    message: cache_pb2.SequencePlan | cache_pb2.DecodeOutcome, copies: Iterable[BlockCopy]
) -> None:
    for copy in copies:
        message.copies.add(
            handle=copy.handle,
            group_index=copy.group_index,
            source_block_id=copy.source_block_id,
            target_block_id=copy.target_block_id,
            token_count=copy.token_count,
            block_index=copy.block_index,
        )


def _fill_freed(
    message: cache_pb2.SequencePlan | cache_pb2.DecodeOutcome, freed: Iterable[FreedBlock]
) -> None:
    for one in freed:
        message.freed_blocks.add(
            handle=one.handle,
            group_index=one.group_index,
            block_index=one.block_index,
            block_id=one.block_id,
        )
