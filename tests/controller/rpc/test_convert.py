import numpy as np
import pytest

from prefixd.controller.core import errors, messages
from prefixd.controller.rpc.convert_identity import identity_message, identity_value
from prefixd.controller.rpc.convert_pool import duration_message, duration_ms, pool_spec_value
from prefixd.controller.rpc.convert_reply import session_message
from prefixd.controller.rpc.convert_step import step_value
from prefixd.v1 import cache_pb2, errors_pb2, pool_pb2, types_pb2


def test_open_entry_carries_every_field():
    """An open arrives whole, with its tokens as one array."""
    request = cache_pb2.StepRequest(
        step_id=3,
        executed_step_id=2,
        token_budget=0,
        entries=[
            cache_pb2.StepEntry(
                open=cache_pb2.OpenEntry(
                    handle=7,
                    token_ids=[1, 2**32 - 1],
                    sequence_id="a",
                    schedule_token_count_max=0,
                    lookahead_slot_count=2,
                    must_fit_token_count=3,
                    preemption_count=4,
                    skip_cache_read=True,
                    await_token_count_min=5,
                )
            )
        ],
    )
    step = step_value(request)
    assert (step.step_id, step.executed_step_id, step.token_budget) == (3, 2, 0)
    entry = step.entries[0]
    assert isinstance(entry, messages.OpenEntry)
    assert entry.token_ids.dtype == np.uint32
    assert entry.token_ids.tolist() == [1, 2**32 - 1]
    assert (entry.handle, entry.sequence_id, entry.identity) == (7, "a", messages.Identity())
    assert entry.schedule_token_count_max == 0
    assert (entry.lookahead_slot_count, entry.must_fit_token_count) == (2, 3)
    assert (entry.preemption_count, entry.skip_cache_read) == (4, True)
    assert entry.await_token_count_min == 5


def test_absent_bounds_stay_absent():
    """An optional field that is not set is None, not 0."""
    request = cache_pb2.StepRequest(
        entries=[
            cache_pb2.StepEntry(open=cache_pb2.OpenEntry()),
            cache_pb2.StepEntry(extend=cache_pb2.ExtendEntry()),
        ]
    )
    step = step_value(request)
    opened, extended = step.entries
    assert step.token_budget is None
    assert step.failed is None
    assert isinstance(opened, messages.OpenEntry)
    assert isinstance(extended, messages.ExtendEntry)
    assert opened.schedule_token_count_max is None
    assert extended.schedule_token_count_max is None
    assert extended.rollback_to_token_count is None
    assert opened.token_ids.dtype == np.uint32


def test_decode_columns_arrive_as_arrays():
    """Decode columns are 64-bit counts, tokens 32-bit ids."""
    entry = cache_pb2.DecodeEntry(
        handles=[2**32 - 1, 1],
        scheduled_count_before=[3, -1],
        known_count_before=[3, 4],
        token_counts=[1, 0],
        token_ids=[9],
    )
    step = step_value(cache_pb2.StepRequest(entries=[cache_pb2.StepEntry(decode=entry)]))
    decoded = step.entries[0]
    assert isinstance(decoded, messages.DecodeEntry)
    assert decoded.handles.tolist() == [2**32 - 1, 1]
    assert decoded.scheduled_count_before.tolist() == [3, -1]
    assert decoded.known_count_before.dtype == np.int64
    assert decoded.token_counts.tolist() == [1, 0]
    assert decoded.token_ids.tolist() == [9]


def test_decode_columns_left_out_say_a_plain_decode():
    """Without its columns every known position is scheduled, and every row supplies one token."""
    entry = cache_pb2.DecodeEntry(handles=[4, 2], scheduled_count_before=[7, 9], token_ids=[5, 6])
    step = step_value(cache_pb2.StepRequest(entries=[cache_pb2.StepEntry(decode=entry)]))
    decoded = step.entries[0]
    assert isinstance(decoded, messages.DecodeEntry)
    assert decoded.known_count_before.tolist() == [7, 9]
    assert decoded.token_counts.tolist() == [1, 1]


def test_empty_entry_is_refused_with_its_place():
    """An entry without a known change fails the step and names the entry."""
    request = cache_pb2.StepRequest(
        entries=[cache_pb2.StepEntry(fork=cache_pb2.ForkEntry()), cache_pb2.StepEntry()]
    )
    with pytest.raises(errors.FieldInvalid) as raised:
        step_value(request)
    assert raised.value.field == "entries[1]"


@pytest.mark.parametrize("reason", [0, 99])
def test_close_without_a_known_reason_is_refused(reason):
    """A close must say why, in words that the controller knows."""
    request = cache_pb2.StepRequest(
        entries=[cache_pb2.StepEntry(close=cache_pb2.CloseEntry(handle=1, reason=reason))]
    )
    with pytest.raises(errors.FieldInvalid) as raised:
        step_value(request)
    assert raised.value.field == "entries[0].close.reason"


def test_half_a_failure_report_still_arrives():
    """A report of failed steps with one end missing reaches the core, which refuses it."""
    step = step_value(cache_pb2.StepRequest(failed_step_id_last=4))
    assert step.failed == messages.FailedSteps(messages.StepId(0), messages.StepId(4))


def identity() -> types_pb2.Identity:
    """An identity with every field set."""
    return types_pb2.Identity(
        lora=types_pb2.LoraAdapter(name="l", path="/l", version="2"),
        multimodal_items=[types_pb2.MultimodalItem(identifier="i", offset=1, token_count=2)],
        cache_salt="s",
        prompt_embeds_digests=[b"d" * 32],
    )


def test_identity_survives_the_round_trip():
    """What inspection shows of an identity is what the driver said."""
    assert identity_message(identity_value(identity())) == identity()


def with_unknown_field(message):
    """Adds a field that no version of the message has."""
    message.MergeFromString(b"\xf8\x3f\x01")
    return message


@pytest.mark.parametrize(
    "place",
    [
        lambda message: message,
        lambda message: message.lora,
        lambda message: message.multimodal_items[0],
    ],
    ids=["identity", "lora", "multimodal_item"],
)
def test_s05_unknown_field_anywhere_in_an_identity_is_noticed(place):
    """S5: a field from a newer client, at any depth, marks the identity as unknown."""
    message = identity()
    assert not identity_value(message).has_unknown_fields
    with_unknown_field(place(message))
    assert identity_value(message).has_unknown_fields


def plan() -> messages.SequencePlan:
    """A plan with every field set."""
    return messages.SequencePlan(
        handle=messages.Handle(1),
        cached=messages.TokenRange(0, 4),
        scheduled=messages.TokenRange(4, 6),
        groups=(
            messages.GroupPlan(
                start_block=0,
                block_ids=np.array([3, 4]),
                slots=messages.SlotRuns(np.array([16]), np.array([2])),
            ),
        ),
        copies=(
            messages.BlockCopy(
                messages.Handle(1), 0, messages.BlockId(5), messages.BlockId(6), 2, 1
            ),
        ),
    )


def test_reply_carries_every_kind_of_outcome():
    """Each outcome of the core has its place in the response, in order."""
    reply = messages.StepReply(
        step_id=messages.StepId(9),
        outcomes=(
            messages.CloseOutcome(),
            messages.DecodeOutcome(
                new_block_ids=(np.array([0, 8]),),
                deferred_rows=(messages.DeferredRow(1, "POOL_EXHAUSTED", 1, 0),),
            ),
            messages.ExtendOutcome(plan()),
            messages.ForkOutcome(plan()),
            messages.OpenOutcome(plan(), published_token_count=4, pending_token_count=0),
            messages.Refusal("SEQUENCE_NOT_FOUND", "no", (("handle", 3),)),
            messages.AwaitPrefix(4, 0, 8, messages.Handle(2)),
        ),
        cut_sequences=(messages.CutSequence(messages.Handle(1), 9, 4),),
        available_block_count=12,
    )
    message = session_message(reply).step
    assert (message.step_id, message.available_block_count) == (9, 12)
    kinds = [outcome.WhichOneof("outcome") for outcome in message.outcomes]
    assert kinds == ["close", "decode", "extend", "fork", "open", "refusal", "await_prefix"]
    decoded = message.outcomes[1].decode
    assert list(decoded.new_blocks[0].block_ids) == [0, 8]
    assert decoded.deferred_rows[0].reason == errors_pb2.ERROR_REASON_POOL_EXHAUSTED
    opened = message.outcomes[4].open
    assert list(opened.plan.groups[0].block_ids) == [3, 4]
    assert list(opened.plan.groups[0].slots.first_slots) == [16]
    (copy,) = opened.plan.copies
    assert (copy.source_block_id, copy.target_block_id) == (5, 6)
    assert (copy.token_count, copy.block_index) == (2, 1)
    assert (opened.plan.cached.end_token, opened.plan.scheduled.end_token) == (4, 6)
    assert dict(message.outcomes[5].refusal.numbers) == {"handle": 3}
    assert message.outcomes[6].await_prefix.awaitable_token_count == 8
    assert message.cut_sequences[0].scheduled_count == 4


def test_registration_fills_in_the_defaults():
    """No block size means 16, no groups one full-attention group, no lease the default."""
    spec = pool_spec_value(pool_pb2.RegisterPoolRequest(pool_name="p", block_count=2))
    assert (spec.block_size, spec.groups, spec.lease_ms) == (16, (messages.GroupSpec(),), None)


def test_group_without_a_kind_is_refused():
    """A KV group must say what it is."""
    request = pool_pb2.RegisterPoolRequest(groups=[types_pb2.KvGroup(layer_count=1)])
    with pytest.raises(errors.FieldInvalid) as raised:
        pool_spec_value(request)
    assert raised.value.field == "groups[0].kind"


@pytest.mark.parametrize("milliseconds", [0, 1, 999, 1_000, 15_250])
def test_durations_keep_their_milliseconds(milliseconds):
    """A lease survives its way to the wire and back."""
    assert duration_ms(duration_message(milliseconds)) == milliseconds
