"""Every reason that a controller's call or entry can give, raised through a real server."""

import grpc
import pytest

from prefixd.controller.core import limits
from prefixd.v1 import cache_pb2, errors_pb2, inspect_pb2, types_pb2
from tests.support.controller import Stubs
from tests.support.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    fork_entry,
    open_entry,
    refused,
)

REASON = errors_pb2.ErrorReason


def accounts(calls: Stubs) -> inspect_pb2.Pool:
    """What a refused message must leave as it was."""
    return calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool


def columns(**fields) -> cache_pb2.StepEntry:
    """A decode entry of one good row, with some columns replaced."""
    row = {
        "handles": [1],
        "scheduled_count_before": [3],
        "known_count_before": [3],
        "token_counts": [1],
        "token_ids": [5],
    }
    return cache_pb2.StepEntry(decode=cache_pb2.DecodeEntry(**(row | fields)))


MALFORMED = [
    ([open_entry(2, [])], {}, "PROMPT_EMPTY", "entries[0].open.token_ids"),
    ([open_entry(2, [1, 50])], {}, "TOKEN_ID_INVALID", "entries[0].open.token_ids[1]"),
    ([columns(token_ids=[50])], {}, "TOKEN_ID_INVALID", "entries[0].decode.token_ids[0]"),
    (
        [extend_entry(1, known=3, scheduled=3, token_ids=[50])],
        {},
        "TOKEN_ID_INVALID",
        "entries[0].extend.token_ids[0]",
    ),
    ([cache_pb2.StepEntry()], {}, "FIELD_INVALID", "entries[0]"),
    (
        [close_entry(1, types_pb2.CLOSE_REASON_UNSPECIFIED)],
        {},
        "FIELD_INVALID",
        "entries[0].close.reason",
    ),
    (
        [open_entry(2, [1], lookahead_slot_count=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].open.lookahead_slot_count",
    ),
    (
        [open_entry(2, [1], schedule_token_count_max=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].open.schedule_token_count_max",
    ),
    (
        [open_entry(2, [1], preemption_count=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].open.preemption_count",
    ),
    (
        [open_entry(2, [1], must_fit_token_count=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].open.must_fit_token_count",
    ),
    (
        [open_entry(2, [1], await_token_count_min=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].open.await_token_count_min",
    ),
    (
        [open_entry(2, [1], sequence_id="x" * 257)],
        {},
        "FIELD_INVALID",
        "entries[0].open.sequence_id",
    ),
    ([columns(token_counts=[-1])], {}, "FIELD_INVALID", "entries[0].decode.token_counts"),
    ([columns(token_counts=[2])], {}, "FIELD_INVALID", "entries[0].decode"),
    ([columns(known_count_before=[3, 3])], {}, "FIELD_INVALID", "entries[0].decode"),
    ([columns(handles=[1, 1])], {}, "FIELD_INVALID", "entries[0].decode"),
    (
        [extend_entry(1, known=-1, scheduled=3)],
        {},
        "FIELD_INVALID",
        "entries[0].extend.known_count_before",
    ),
    (
        [extend_entry(1, known=3, scheduled=3, draft_token_count=-1)],
        {},
        "FIELD_INVALID",
        "entries[0].extend.draft_token_count",
    ),
    ([], {"token_budget": -1}, "FIELD_INVALID", "token_budget"),
    ([], {"executed_step_id": -1}, "FIELD_INVALID", "executed_step_id"),
    ([], {"executed_step_id": 9}, "FIELD_INVALID", "executed_step_id"),
    ([], {"failed_step_id": 7, "failed_step_id_last": 9}, "FIELD_INVALID", "failed_step_id"),
    (
        [open_entry(2, [1], identity=types_pb2.Identity(cache_salt="x" * 129))],
        {},
        "FIELD_INVALID",
        "entries[0].open.identity.cache_salt",
    ),
    (
        [
            cache_pb2.StepEntry(
                fork=cache_pb2.ForkEntry(parent_handle=1, child_handle=2, child_sequence_id="c")
            )
        ],
        {},
        "FIELD_INVALID",
        "entries[0].fork.token_count",
    ),
    (
        [fork_entry(1, 9, token_count=1)],
        {},
        "FIELD_INVALID",
        "entries[0].fork.child_handle",
    ),
]


@pytest.mark.parametrize(("entries", "fields", "reason", "field"), MALFORMED)
def test_malformed_step_names_its_field_and_changes_nothing(calls, entries, fields, reason, field):
    """What the message alone shows to be wrong fails the call; no entry of it is applied."""
    driver = Driver(calls, vocabulary_size=50)
    driver.step(open_entry(1, [1, 2, 3]))
    before = accounts(calls)
    error = refused(lambda: driver.step(open_entry(9, [4]), *entries, **fields))
    moved = field.replace("entries[0]", "entries[1]")
    assert error.reason == reason
    assert error.fields[0].startswith(moved)
    assert error.domain == "prefixd"
    assert accounts(calls) == before


@pytest.mark.parametrize("step_id", [0, -1, 2, 5])
def test_step_out_of_order_says_which_id_is_next(calls, step_id):
    """An id that is neither known nor next is ABORTED with the expected id."""
    driver = Driver(calls)
    error = refused(lambda: driver.step(step_id=step_id))
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "STEP_OUT_OF_ORDER")
    assert error.metadata["expected_step_id"] == "1"


def test_fifth_unconfirmed_step_is_refused(calls):
    """At most four steps may be unconfirmed; the refusal says so and when to retry."""
    driver = Driver(calls)
    for _ in range(limits.STEPS_IN_FLIGHT_MAX):
        driver.step(executed_step_id=0)
    error = refused(lambda: driver.step(executed_step_id=0))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STEPS_IN_FLIGHT")
    assert "RetryInfo" in error.detail_names
    assert driver.step(executed_step_id=1).step_id == limits.STEPS_IN_FLIGHT_MAX + 1


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"pool_name": "other"}, grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND"),
        ({"epoch": 3}, grpc.StatusCode.ABORTED, "EPOCH_STALE"),
        ({"session_token": b"x"}, grpc.StatusCode.FAILED_PRECONDITION, "NOT_POOL_DRIVER"),
    ],
)
def test_stranger_cannot_step(calls, fields, code, reason):
    """A step needs a live pool, its epoch and its secret."""
    driver = Driver(calls)
    request = driver.request(open_entry(1, [1]))
    for name, value in fields.items():
        setattr(request, name, value)
    error = refused(lambda: calls.cache.Step(request))
    assert (error.code, error.reason) == (code, reason)
    assert accounts(calls).sequence_count == 0


def refusal(response: cache_pb2.StepResponse) -> cache_pb2.Refusal:
    """The refusal in the last place of a response."""
    outcome = response.outcomes[-1]
    assert outcome.WhichOneof("outcome") == "refusal", outcome
    return outcome.refusal


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (open_entry(2, [1] * 9), REASON.ERROR_REASON_POOL_EXHAUSTED),
        (open_entry(2, [1] * 17), REASON.ERROR_REASON_SEQUENCE_EXCEEDS_POOL),
        (open_entry(1, [1]), REASON.ERROR_REASON_SEQUENCE_EXISTS),
        (open_entry(2, [1], sequence_id="sequence-1"), REASON.ERROR_REASON_SEQUENCE_EXISTS),
        (close_entry(5), REASON.ERROR_REASON_SEQUENCE_NOT_FOUND),
        (extend_entry(5, known=1, scheduled=1), REASON.ERROR_REASON_SEQUENCE_NOT_FOUND),
        (extend_entry(1, known=4, scheduled=9), REASON.ERROR_REASON_POSITION_MISMATCH),
    ],
)
def test_state_refuses_an_entry(calls, entry, reason):
    """What depends on the pool's state is an outcome, and changes no account."""
    driver = Driver(calls, block_count=5)
    driver.step(open_entry(1, list(range(8))))
    before = accounts(calls)
    assert refusal(driver.step(entry)).reason == reason
    after = accounts(calls)
    for name in ("held_block_count", "free_block_count", "sequence_count", "statistics"):
        assert getattr(after, name) == getattr(before, name)


def test_spent_token_budget_refuses_an_entry(calls):
    """The budget is used in order; what comes when nothing is left is refused."""
    driver = Driver(calls)
    response = driver.step(open_entry(1, [1, 2, 3]), open_entry(2, [4, 5]), token_budget=3)
    assert response.outcomes[0].open.plan.scheduled.end_token == 3
    assert refusal(response).reason == REASON.ERROR_REASON_TOKEN_BUDGET


def test_copy_of_what_this_step_computes_is_deferred_or_refused(calls):
    """COPY_IN_SAME_STEP reaches the driver as a deferred row and as a refused extend (S16)."""
    driver = Driver(calls)
    response = driver.step(
        open_entry(1, [1, 2, 3, 4, 5, 6]),
        fork_entry(1, 2, token_count=6),
        decode_entry((2, 6, 7)),
        extend_entry(2, known=6, scheduled=6, token_ids=[7]),
    )
    decoded, extended = response.outcomes[2].decode, response.outcomes[3].refusal
    assert [row.reason for row in decoded.deferred_rows] == [REASON.ERROR_REASON_COPY_IN_SAME_STEP]
    assert extended.reason == REASON.ERROR_REASON_COPY_IN_SAME_STEP


def test_deferred_decode_rows_say_why(calls):
    """A row of an unknown handle or a wrong position is deferred with its reason."""
    driver = Driver(calls)
    driver.step(open_entry(1, [1, 2, 3]))
    decoded = driver.step(decode_entry((1, 9, 5), (8, 1, 5))).outcomes[0].decode
    assert [(row.row, row.reason) for row in decoded.deferred_rows] == [
        (0, REASON.ERROR_REASON_POSITION_MISMATCH),
        (1, REASON.ERROR_REASON_SEQUENCE_NOT_FOUND),
    ]


def test_equal_prompt_is_told_to_await_its_prefix(calls):
    """S10: an open that asks for it waits for a prefix that is still being computed."""
    driver = Driver(calls)
    driver.step(open_entry(1, list(range(40)), schedule_token_count_max=8))
    response = driver.step(open_entry(2, list(range(40)), await_token_count_min=8))
    waiting = response.outcomes[0].await_prefix
    assert waiting.handle == 1
    assert waiting.awaitable_token_count >= 8
    assert accounts(calls).sequence_count == 1


def test_registered_pools_are_bounded(calls, monkeypatch):
    """One pool too many is RESOURCE_EXHAUSTED / LIMIT_EXCEEDED with the limit."""
    monkeypatch.setattr(limits, "POOLS_MAX", 2)
    Driver(calls, "a")
    Driver(calls, "b")
    error = refused(lambda: Driver(calls, "c"))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert error.metadata["pools_max"] == "2"


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"pool_name": ""}, "FIELD_INVALID", "pool_name"),
        ({"pool_name": "a b"}, "FIELD_INVALID", "pool_name"),
        ({"block_count": 1}, "FIELD_INVALID", "block_count"),
        ({"block_count": -1}, "FIELD_INVALID", "block_count"),
        ({"block_size": -1}, "FIELD_INVALID", "block_size"),
        ({"block_size": 4_096, "block_count": 2**20}, "FIELD_INVALID", "block_count"),
        ({"lease": {"seconds": -1}}, "FIELD_INVALID", "lease"),
        ({"lease": {"seconds": 601}}, "FIELD_INVALID", "lease"),
        ({"groups": [types_pb2.KvGroup()]}, "FIELD_INVALID", "groups[0].kind"),
        (
            {"groups": [types_pb2.KvGroup(kind=types_pb2.KV_GROUP_KIND_STATE_SPACE)]},
            "UNSUPPORTED",
            "groups",
        ),
    ],
)
def test_bad_registration_names_its_field(calls, fields, reason, field):
    """A registration that cannot be is refused, and no pool comes of it."""
    error = refused(lambda: Driver(calls, **fields))
    assert (error.reason, error.fields[0]) == (reason, field)
    info = calls.inspect.GetServerInfo(inspect_pb2.GetServerInfoRequest())
    assert info.pool_count == 0
