"""Step drafts as protobuf messages, and the controller's answers as plain data."""

from collections.abc import Iterable

from prefixd.v1 import cache_pb2, errors_pb2, types_pb2
from prefixd.worker.lora import LoraIdentity
from prefixd.worker.plan_check import PlanInvalid
from prefixd.worker.retention import Continuation, RetentionHint
from prefixd.worker.rpc.packed import PackedColumn
from prefixd.worker.step import (
    Awaiting,
    CloseReason,
    Copy,
    Cut,
    Decoded,
    DecodeRow,
    Extend,
    Extended,
    Fork,
    Forked,
    Freed,
    GroupPlan,
    Open,
    Opened,
    Plan,
    Refused,
    Remap,
    StepAnswer,
    StepDraft,
)

CLOSE_REASONS = {
    CloseReason.FINISHED: types_pb2.CLOSE_REASON_FINISHED,
    CloseReason.ABORTED: types_pb2.CLOSE_REASON_ABORTED,
    CloseReason.PREEMPTED: types_pb2.CLOSE_REASON_PREEMPTED,
}
CONTINUATIONS = {
    Continuation.UNKNOWN: cache_pb2.CONTINUATION_UNSPECIFIED,
    Continuation.EXPECTED: cache_pb2.CONTINUATION_EXPECTED,
    Continuation.OVER: cache_pb2.CONTINUATION_OVER,
}
DECODE_HANDLES = PackedColumn(cache_pb2.DecodeEntry, "handles")
DECODE_SCHEDULED_COUNTS = PackedColumn(cache_pb2.DecodeEntry, "scheduled_count_before")
DECODE_TOKEN_IDS = PackedColumn(cache_pb2.DecodeEntry, "token_ids")
EXTEND_TOKEN_IDS = PackedColumn(cache_pb2.ExtendEntry, "token_ids")
OPEN_TOKEN_IDS = PackedColumn(cache_pb2.OpenEntry, "token_ids")


def step_request(
    draft: StepDraft, *, step_id: int, executed_step_id: int, failed_step_id: int = 0
) -> cache_pb2.StepRequest:
    """The draft as a message of a session; ``failed_step_id`` 0: no step failed."""
    request = cache_pb2.StepRequest(
        step_id=step_id,
        executed_step_id=executed_step_id,
        token_budget=draft.token_budget,
        failed_step_id=failed_step_id,
        failed_step_id_last=failed_step_id,
    )
    for fork in draft.forks:
        _fill_fork(request.entries.add().fork, fork)
    for close in draft.closes:
        entry = request.entries.add().close
        entry.handle = close.handle
        entry.reason = CLOSE_REASONS[close.reason]
    if draft.decode_rows:
        _fill_decode(request.entries.add().decode, draft.decode_rows)
    for extend in draft.extends:
        _fill_extend(request.entries.add().extend, extend)
    for opening in draft.opens:
        _fill_open(request.entries.add().open, opening)
    return request


def step_answer(response: cache_pb2.StepResponse, draft: StepDraft) -> StepAnswer:
    """The response to the draft's step.

    Raises:
        PlanInvalid: the outcomes are not those of the draft's entries.
    """
    outcomes = list(response.outcomes)
    fork_count = len(draft.forks)
    close_end = fork_count + len(draft.closes)
    row_end = close_end + (1 if draft.decode_rows else 0)
    extend_end = row_end + len(draft.extends)
    if len(outcomes) != extend_end + len(draft.opens):
        raise PlanInvalid(f"step {response.step_id} has {len(outcomes)} outcomes")
    decoded = Decoded()
    if draft.decode_rows:
        decoded = _decoded(outcomes[close_end], row_count=len(draft.decode_rows))
    return StepAnswer(
        step_id=response.step_id,
        forks=tuple(map(_forked, outcomes[:fork_count])),
        decoded=decoded,
        extends=tuple(map(_extended, outcomes[row_end:extend_end])),
        opens=tuple(map(_opened, outcomes[extend_end:])),
        cuts=tuple(
            Cut(cut.handle, known_count=cut.known_count, scheduled_count=cut.scheduled_count)
            for cut in response.cut_sequences
        ),
        available_block_count=response.available_block_count,
        remaps=tuple(
            Remap(
                remap.handle,
                remap.block_index,
                remap.old_block_id,
                remap.new_block_id,
                remap.group_index,
            )
            for remap in response.remaps
        ),
    )


def reason_name(reason: errors_pb2.ErrorReason.ValueType) -> str:
    """The reason without its prefix; a number where this worker does not know it."""
    try:
        return errors_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    except ValueError:
        return f"UNKNOWN_{reason}"


def _fill_fork(entry: cache_pb2.ForkEntry, fork: Fork) -> None:
    entry.parent_handle = fork.parent_handle
    entry.child_handle = fork.handle
    entry.child_sequence_id = fork.sequence.sequence_id
    entry.token_count = fork.token_count


def _fill_decode(entry: cache_pb2.DecodeEntry, rows: tuple[DecodeRow, ...]) -> None:
    # Every row supplies the one token whose position it schedules: two columns say no more.
    DECODE_HANDLES.append(entry, [row.handle for row in rows])
    DECODE_SCHEDULED_COUNTS.append(entry, [row.position for row in rows])
    DECODE_TOKEN_IDS.append(entry, [row.token_id for row in rows])


def _fill_extend(entry: cache_pb2.ExtendEntry, extend: Extend) -> None:
    entry.handle = extend.handle
    entry.known_count_before = extend.known_count_before
    entry.scheduled_count_before = extend.scheduled_count_before
    EXTEND_TOKEN_IDS.append(entry, extend.token_ids)
    entry.schedule_token_count_max = extend.schedule_token_count_max
    entry.draft_token_count = len(extend.draft_token_ids)
    if extend.rollback_to_token_count is not None:
        entry.rollback_to_token_count = extend.rollback_to_token_count


def _fill_open(entry: cache_pb2.OpenEntry, opening: Open) -> None:
    sequence = opening.sequence
    entry.handle = opening.handle
    OPEN_TOKEN_IDS.append(entry, opening.token_ids)
    entry.sequence_id = sequence.sequence_id
    entry.schedule_token_count_max = opening.schedule_token_count_max
    entry.must_fit_token_count = opening.must_fit_token_count
    entry.preemption_count = sequence.preemption_count
    entry.skip_cache_read = sequence.skip_cache_read
    entry.await_token_count_min = opening.await_token_count_min
    if sequence.retention_hint is not None:
        # It holds when the sequence is closed, and for its forks.
        _fill_hint(entry.retention_hint, sequence.retention_hint)
    if sequence.cache_salt:
        entry.identity.cache_salt = sequence.cache_salt
    if sequence.lora is not None:
        entry.identity.lora.CopyFrom(lora_message(sequence.lora))


def _fill_hint(message: cache_pb2.RetentionHint, hint: RetentionHint) -> None:
    message.continuation = CONTINUATIONS[hint.continuation]
    message.priority = hint.priority
    message.duration_ms = hint.duration_ms


def lora_message(lora: LoraIdentity) -> types_pb2.LoraAdapter:
    """An adapter as part of the identity."""
    return types_pb2.LoraAdapter(name=lora.name, path=lora.path, version=lora.version)


def _decoded(outcome: cache_pb2.EntryOutcome, *, row_count: int) -> Decoded:
    if outcome.WhichOneof("outcome") == "refusal":
        reason = reason_name(outcome.refusal.reason)
        return Decoded(deferred=dict.fromkeys(range(row_count), reason))
    _expect(outcome, "decode")
    decode = outcome.decode
    return Decoded(
        new_block_ids=tuple(tuple(column.block_ids) for column in decode.new_blocks),
        deferred={row.row: reason_name(row.reason) for row in decode.deferred_rows},
        copies=_copies(decode.copies),
        freed=_freed(decode.freed_blocks),
    )


def _forked(outcome: cache_pb2.EntryOutcome) -> Forked | Refused:
    if outcome.WhichOneof("outcome") == "refusal":
        return _refused(outcome.refusal)
    _expect(outcome, "fork")
    return Forked(tuple(tuple(group.block_ids) for group in outcome.fork.plan.groups))


def _extended(outcome: cache_pb2.EntryOutcome) -> Extended | Refused:
    if outcome.WhichOneof("outcome") == "refusal":
        return _refused(outcome.refusal)
    _expect(outcome, "extend")
    return Extended(_plan(outcome.extend.plan))


def _opened(outcome: cache_pb2.EntryOutcome) -> Opened | Awaiting | Refused:
    match outcome.WhichOneof("outcome"):
        case "refusal":
            return _refused(outcome.refusal)
        case "await_prefix":
            return Awaiting(outcome.await_prefix.awaitable_token_count)
        case _:
            _expect(outcome, "open")
            opened = outcome.open
            cached_token_count = opened.published_token_count + opened.pending_token_count
            return Opened(_plan(opened.plan), cached_token_count)


def _refused(refusal: cache_pb2.Refusal) -> Refused:
    return Refused(reason_name(refusal.reason), refusal.message, dict(refusal.numbers))


def _plan(plan: cache_pb2.SequencePlan) -> Plan:
    return Plan(
        handle=plan.handle,
        cached_end=plan.cached.end_token,
        scheduled_start=plan.scheduled.start_token,
        scheduled_end=plan.scheduled.end_token,
        groups=tuple(map(_group_plan, plan.groups)),
        copies=_copies(plan.copies),
        freed=_freed(plan.freed_blocks),
    )


def _group_plan(group: cache_pb2.GroupPlan) -> GroupPlan:
    runs = zip(group.slots.first_slots, group.slots.slot_counts, strict=True)
    return GroupPlan(
        start_block=group.start_block,
        block_ids=tuple(group.block_ids),
        slots=tuple(slot for first, count in runs for slot in range(first, first + count)),
    )


def _freed(blocks: Iterable[types_pb2.FreedBlock]) -> tuple[Freed, ...]:
    return tuple(
        Freed(block.handle, block.group_index, block.block_index, block.block_id)
        for block in blocks
    )


def _copies(copies: Iterable[types_pb2.BlockCopy]) -> tuple[Copy, ...]:
    return tuple(
        Copy(
            copy.source_block_id,
            copy.target_block_id,
            copy.token_count,
            handle=copy.handle,
            block_index=copy.block_index,
            group_index=copy.group_index,
        )
        for copy in copies
    )


def _expect(outcome: cache_pb2.EntryOutcome, kind: str) -> None:
    given = outcome.WhichOneof("outcome")
    if given != kind:
        raise PlanInvalid(f"an outcome {given} where {kind} was asked for")
