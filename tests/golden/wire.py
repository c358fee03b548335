"""Turns the core's messages into protobuf requests, and plans back, for what traces need."""

import numpy as np

from prefixd.controller.core.messages import (
    CloseEntry,
    CloseOutcome,
    CloseReason,
    Entry,
    ExtendEntry,
    ExtendOutcome,
    GroupPlan,
    Handle,
    Identity,
    OpenEntry,
    OpenOutcome,
    Outcome,
    Refusal,
    SequencePlan,
    SlotRuns,
    Step,
    StepId,
    StepReply,
    TokenRange,
)
from prefixd.v1 import cache_pb2, errors_pb2, types_pb2

CLOSE_REASONS = {
    CloseReason.FINISHED: types_pb2.CLOSE_REASON_FINISHED,
    CloseReason.ABORTED: types_pb2.CLOSE_REASON_ABORTED,
    CloseReason.PREEMPTED: types_pb2.CLOSE_REASON_PREEMPTED,
}


def step_request(step: Step) -> cache_pb2.StepRequest:
    """Returns the request for a step of opens, extends and closes, for a session."""
    return cache_pb2.StepRequest(
        step_id=step.step_id,
        executed_step_id=step.executed_step_id,
        entries=[_entry(entry) for entry in step.entries],
    )


def _entry(entry: Entry) -> cache_pb2.StepEntry:
    match entry:
        case OpenEntry():
            return cache_pb2.StepEntry(open=_open(entry))
        case ExtendEntry():
            return cache_pb2.StepEntry(extend=_extend(entry))
        case CloseEntry():
            return cache_pb2.StepEntry(
                close=cache_pb2.CloseEntry(handle=entry.handle, reason=CLOSE_REASONS[entry.reason])
            )
    raise AssertionError(f"no trace holds such an entry: {entry}")


def _open(entry: OpenEntry) -> cache_pb2.OpenEntry:
    return cache_pb2.OpenEntry(
        handle=entry.handle,
        token_ids=entry.token_ids.tolist(),
        sequence_id=entry.sequence_id,
        identity=identity_message(entry.identity),
        schedule_token_count_max=entry.schedule_token_count_max,
        lookahead_slot_count=entry.lookahead_slot_count,
        preemption_count=entry.preemption_count,
    )


def _extend(entry: ExtendEntry) -> cache_pb2.ExtendEntry:
    return cache_pb2.ExtendEntry(
        handle=entry.handle,
        known_count_before=entry.known_count_before,
        scheduled_count_before=entry.scheduled_count_before,
        token_ids=entry.token_ids.tolist(),
        schedule_token_count_max=entry.schedule_token_count_max,
        lookahead_slot_count=entry.lookahead_slot_count,
    )


def identity_message(identity: Identity) -> types_pb2.Identity | None:
    """Returns the message of an identity; None where it says nothing."""
    if identity == Identity():
        return None
    lora = identity.lora
    return types_pb2.Identity(
        lora=None
        if lora is None
        else types_pb2.LoraAdapter(name=lora.name, path=lora.path, version=lora.version),
        multimodal_items=[
            types_pb2.MultimodalItem(
                identifier=item.identifier, offset=item.offset, token_count=item.token_count
            )
            for item in identity.multimodal_items
        ],
        cache_salt=identity.cache_salt,
        prompt_embeds_digests=identity.prompt_embeds_digests,
    )


def step_reply(response: cache_pb2.StepResponse) -> StepReply:
    """Returns the reply of a step of opens, extends and closes."""
    return StepReply(
        StepId(response.step_id),
        tuple(_outcome(outcome) for outcome in response.outcomes),
        available_block_count=response.available_block_count,
    )


def _outcome(message: cache_pb2.EntryOutcome) -> Outcome:
    match message.WhichOneof("outcome"):
        case "open":
            return OpenOutcome(
                _plan(message.open.plan),
                message.open.published_token_count,
                message.open.pending_token_count,
            )
        case "extend":
            return ExtendOutcome(_plan(message.extend.plan))
        case "close":
            return CloseOutcome()
        case "refusal":
            reason = errors_pb2.ErrorReason.Name(message.refusal.reason)
            return Refusal(
                reason.removeprefix("ERROR_REASON_"),
                message.refusal.message,
                tuple(sorted(message.refusal.numbers.items())),
            )
    raise AssertionError(f"no trace leads to such an outcome: {message}")


def _plan(message: cache_pb2.SequencePlan) -> SequencePlan:
    return SequencePlan(
        handle=Handle(message.handle),
        cached=TokenRange(message.cached.start_token, message.cached.end_token),
        scheduled=TokenRange(message.scheduled.start_token, message.scheduled.end_token),
        groups=tuple(
            GroupPlan(
                group.start_block,
                np.array(group.block_ids, np.int64),
                SlotRuns(
                    np.array(group.slots.first_slots, np.int64),
                    np.array(group.slots.slot_counts, np.int64),
                ),
            )
            for group in message.groups
        ),
    )
