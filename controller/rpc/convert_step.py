"""Steps: protobuf to core.

What one message alone shows to be malformed beyond the core's types (an empty oneof, an enum left
unspecified) is refused here; every other check is the core's.
"""

import numpy as np

from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.hints import NO_HINT, Continuation, RetentionHint
from prefixd.controller.core.limits import DECODE_ROWS_MAX
from prefixd.controller.core.messages import (
    CloseEntry,
    CloseReason,
    DecodeEntry,
    Entry,
    ExtendEntry,
    FailedSteps,
    ForkEntry,
    Handle,
    OpenEntry,
    SequenceId,
    Step,
    StepId,
)
from prefixd.controller.rpc.convert_identity import IDENTITY_NONE, identity_value
from prefixd.v1 import cache_pb2, types_pb2

CLOSE_REASONS = {
    types_pb2.CLOSE_REASON_FINISHED: CloseReason.FINISHED,
    types_pb2.CLOSE_REASON_ABORTED: CloseReason.ABORTED,
    types_pb2.CLOSE_REASON_PREEMPTED: CloseReason.PREEMPTED,
}
CONTINUATIONS = {
    cache_pb2.CONTINUATION_UNSPECIFIED: Continuation.UNKNOWN,
    cache_pb2.CONTINUATION_EXPECTED: Continuation.EXPECTED,
    cache_pb2.CONTINUATION_OVER: Continuation.OVER,
}
ONE_EACH = np.ones(DECODE_ROWS_MAX, dtype=np.int64)
"""The token counts of a decode entry that states none."""
ONE_EACH.flags.writeable = False


def step_value(request: cache_pb2.StepRequest) -> Step:
    """Converts a step. Raises FieldInvalid with the field's path from the step."""
    failed = None
    if request.failed_step_id or request.failed_step_id_last:
        failed = FailedSteps(
            first_step_id=StepId(request.failed_step_id),
            last_step_id=StepId(request.failed_step_id_last),
        )
    return Step(
        step_id=StepId(request.step_id),
        executed_step_id=StepId(request.executed_step_id),
        entries=tuple(_entry(message, index) for index, message in enumerate(request.entries)),
        failed=failed,
        token_budget=request.token_budget if request.HasField("token_budget") else None,
    )


def _entry(message: cache_pb2.StepEntry, index: int) -> Entry:
    match message.WhichOneof("entry"):
        case "decode":
            return _decode(message.decode)
        case "extend":
            return _extend(message.extend)
        case "open":
            return _open(message.open, index)
        case "close":
            return _close(message.close, index)
        case "fork":
            return _fork(message.fork)
        case _:
            raise FieldInvalid(
                f"entries[{index}] holds no entry that this controller knows",
                field=f"entries[{index}]",
            )


def _open(message: cache_pb2.OpenEntry, index: int) -> OpenEntry:
    return OpenEntry(
        handle=Handle(message.handle),
        sequence_id=SequenceId(message.sequence_id),
        # One bulk copy: upb offers the whole field as an array.
        token_ids=np.array(message.token_ids, dtype=np.uint32),
        identity=identity_value(message.identity)
        if message.HasField("identity")
        else IDENTITY_NONE,
        schedule_token_count_max=message.schedule_token_count_max
        if message.HasField("schedule_token_count_max")
        else None,
        lookahead_slot_count=message.lookahead_slot_count,
        must_fit_token_count=message.must_fit_token_count,
        preemption_count=message.preemption_count,
        skip_cache_read=message.skip_cache_read,
        await_token_count_min=message.await_token_count_min,
        retention_hint=_retention_hint(message.retention_hint, f"entries[{index}].open")
        if message.HasField("retention_hint")
        else NO_HINT,
    )


def _extend(message: cache_pb2.ExtendEntry) -> ExtendEntry:
    return ExtendEntry(
        handle=Handle(message.handle),
        known_count_before=message.known_count_before,
        scheduled_count_before=message.scheduled_count_before,
        token_ids=np.array(message.token_ids, dtype=np.uint32),
        schedule_token_count_max=message.schedule_token_count_max
        if message.HasField("schedule_token_count_max")
        else None,
        lookahead_slot_count=message.lookahead_slot_count,
        rollback_to_token_count=message.rollback_to_token_count
        if message.HasField("rollback_to_token_count")
        else None,
        draft_token_count=message.draft_token_count,
    )


def _decode(message: cache_pb2.DecodeEntry) -> DecodeEntry:
    handles = np.array(message.handles, dtype=np.int64)
    scheduled = np.array(message.scheduled_count_before, dtype=np.int64)
    known = message.known_count_before
    counts = message.token_counts
    return DecodeEntry(
        handles=handles,
        scheduled_count_before=scheduled,
        known_count_before=np.array(known, dtype=np.int64) if known else scheduled,
        token_counts=np.array(counts, dtype=np.int64) if counts else ONE_EACH[: len(handles)],
        token_ids=np.array(message.token_ids, dtype=np.uint32),
    )


def _close(message: cache_pb2.CloseEntry, index: int) -> CloseEntry:
    reason = CLOSE_REASONS.get(message.reason)
    if reason is None:
        field = f"entries[{index}].close.reason"
        raise FieldInvalid(f"{field} must be a known reason, not {message.reason}", field=field)
    return CloseEntry(
        handle=Handle(message.handle),
        reason=reason,
        retention_hint=_retention_hint(message.retention_hint, f"entries[{index}].close")
        if message.HasField("retention_hint")
        else None,
    )


def _retention_hint(message: cache_pb2.RetentionHint, entry: str) -> RetentionHint:
    continuation = CONTINUATIONS.get(message.continuation)
    if continuation is None:
        field = f"{entry}.retention_hint.continuation"
        raise FieldInvalid(
            f"{field} must be a known continuation, not {message.continuation}", field=field
        )
    return RetentionHint(continuation, message.priority, message.duration_ms)


def _fork(message: cache_pb2.ForkEntry) -> ForkEntry:
    return ForkEntry(
        parent_handle=Handle(message.parent_handle),
        child_handle=Handle(message.child_handle),
        child_sequence_id=SequenceId(message.child_sequence_id),
        token_count=message.token_count,
    )
