import grpc
import pytest

from prefixd.v1 import cache_pb2, errors_pb2, inspect_pb2, pool_pb2
from tests.support.driver import (
    Driver,
    SessionClient,
    call_error,
    close_entry,
    open_entry,
    refused,
    session,
    wait_session_ended,
)

PROMPT = list(range(10))
LEASE_MS = 15_000


def pool_of(driver: Driver) -> inspect_pb2.Pool:
    """The pool's accounts."""
    request = inspect_pb2.GetPoolRequest(pool_name=driver.pool_name)
    return driver.stubs.inspect.GetPool(request).pool


def end_of(client: SessionClient):
    """The error that ends a stream."""
    with pytest.raises(grpc.RpcError) as raised:
        client.receive()
    return call_error(raised.value)


def test_ready_tells_what_was_applied_and_executed(calls):
    """A session begins with the last applied and the last executed step."""
    driver = Driver(calls)
    driver.step(open_entry(1, PROMPT))
    driver.step()
    client = SessionClient(calls)
    ready = client.start(driver)
    client.finish()
    assert (ready.applied_step_id, ready.executed_step_id) == (2, 1)


def test_steps_are_answered_in_order(calls):
    """Steps sent ahead are answered one by one, in their order."""
    driver = Driver(calls)
    with session(driver) as client:
        for step_id in range(1, 4):
            client.send_step(
                driver.request(open_entry(step_id, PROMPT), step_id=step_id, executed_step_id=0)
            )
        assert [client.receive().step.step_id for _ in range(3)] == [1, 2, 3]


def test_step_of_a_session_may_leave_its_address_out(calls):
    """The start names pool, epoch and token; steps need not repeat them."""
    driver = Driver(calls)
    with session(driver) as client:
        response = client.step(cache_pb2.StepRequest(step_id=1, entries=[open_entry(1, PROMPT)]))
    assert response.outcomes[0].WhichOneof("outcome") == "open"


@pytest.mark.parametrize(
    ("field", "value"), [("pool_name", "other"), ("epoch", 7), ("session_token", b"other")]
)
def test_step_addressed_to_another_pool_is_refused_in_band(calls, field, value):
    """What a step repeats of its start must be equal; the stream stays open."""
    driver = Driver(calls)
    with session(driver) as client:
        client.send_step(driver.request(**{field: value}))
        error = client.receive().error
        assert (error.step_id, error.field) == (1, field)
        assert error.reason == errors_pb2.ERROR_REASON_FIELD_INVALID
        assert client.step(driver.request()).step_id == 1


def test_refused_step_leaves_the_stream_open_and_its_id_unused(calls):
    """A malformed step is answered in band; the next try may use the same id."""
    driver = Driver(calls)
    with session(driver) as client:
        client.send_step(driver.request(close_entry(1), open_entry(1, [])))
        error = client.receive().error
        assert error.step_id == 1
        assert error.reason == errors_pb2.ERROR_REASON_PROMPT_EMPTY
        assert error.field == "entries[1].open.token_ids"
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert client.step(driver.request(open_entry(1, [5]))).step_id == 1


def test_steps_behind_a_refused_one_are_out_of_order(calls):
    """Steps sent behind a refused one are refused too and say which id is expected."""
    driver = Driver(calls)
    with session(driver) as client:
        client.send_step(driver.request(open_entry(1, [])))
        client.send_step(driver.request(step_id=2))
        assert client.receive().error.step_id == 1
        behind = client.receive().error
    assert behind.reason == errors_pb2.ERROR_REASON_STEP_OUT_OF_ORDER
    assert dict(behind.metadata)["expected_step_id"] == "1"


def test_unary_step_is_refused_while_a_session_is_open(calls):
    """While a session is open it alone carries steps; behind it unary steps go on."""
    driver = Driver(calls)
    with session(driver):
        error = refused(driver.step)
        assert (error.code, error.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "SESSION_ACTIVE",
        )


def test_second_session_is_refused(calls):
    """A pool has one session; the open one is not disturbed."""
    driver = Driver(calls)
    with session(driver) as client:
        second = SessionClient(calls)
        second.send(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**driver.key)))
        assert end_of(second).reason == "SESSION_ACTIVE"
        second.cancel()
        assert client.step(driver.request()).step_id == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pool_name": "other"}, "POOL_NOT_FOUND"),
        ({"epoch": 1}, "EPOCH_STALE"),
        ({"session_token": b"guessed"}, "NOT_POOL_DRIVER"),
    ],
)
def test_start_of_a_stranger_is_refused(calls, fields, reason):
    """A start needs a live pool, its epoch and its secret."""
    driver = Driver(calls)
    client = SessionClient(calls)
    client.send(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**(driver.key | fields))))
    assert end_of(client).reason == reason
    client.cancel()


@pytest.mark.parametrize(
    "first",
    [cache_pb2.SessionRequest(), cache_pb2.SessionRequest(step=cache_pb2.StepRequest(step_id=1))],
    ids=["nothing", "step"],
)
def test_session_must_begin_with_a_start(calls, first):
    """A stream that begins with anything else is refused."""
    client = SessionClient(calls)
    client.send(first)
    error = end_of(client)
    assert (error.reason, error.fields) == ("FIELD_INVALID", ("start",))
    client.cancel()


def test_second_start_ends_the_stream(calls):
    """A start in the middle of a session has no step id to answer to; the stream ends."""
    driver = Driver(calls)
    client = SessionClient(calls)
    client.start(driver)
    client.send(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**driver.key)))
    assert end_of(client).reason == "FIELD_INVALID"
    client.cancel()


def test_lease_stands_still_while_a_session_is_open(controller, calls):
    """An idle session keeps its pool."""
    driver = Driver(calls)
    with session(driver) as client:
        controller.expire_leases(advance_ms=10 * LEASE_MS)
        pool = pool_of(driver)
        assert pool.session_active
        assert not pool.HasField("lease_left")
        assert client.step(driver.request()).step_id == 1


def test_broken_stream_starts_the_lease(controller, calls):
    """Once its stream breaks a pool lives as long as its lease, and holds nothing after it."""
    driver = Driver(calls)
    with session(driver) as client:
        client.step(driver.request(open_entry(1, PROMPT)))
        controller.expire_leases(advance_ms=LEASE_MS)
    wait_session_ended(driver)
    assert pool_of(driver).lease_left.ToMilliseconds() == LEASE_MS
    controller.expire_leases(advance_ms=LEASE_MS)
    assert refused(lambda: pool_of(driver)).reason == "POOL_NOT_FOUND"


def test_session_resumes_within_the_lease(controller, calls):
    """A driver that comes back sends the step whose reply it lost, gets it, and goes on."""
    driver = Driver(calls)
    with session(driver) as client:
        client.step(driver.request(open_entry(1, PROMPT)))
        client.send_step(driver.request(open_entry(2, PROMPT), step_id=2, executed_step_id=0))
    wait_session_ended(driver)
    with session(driver) as client:
        first = client.step(driver.request(open_entry(1, PROMPT)))
        second = client.step(driver.request(open_entry(2, PROMPT), step_id=2, executed_step_id=0))
        third = client.step(driver.request(step_id=3, executed_step_id=2))
    assert list(first.outcomes[0].open.plan.groups[0].block_ids) == [1, 2, 3]
    assert list(second.outcomes[0].open.plan.groups[0].block_ids)[:2] == [1, 2]
    assert (third.step_id, pool_of(driver).sequence_count) == (3, 2)


def test_half_closed_session_ends_well(controller, calls):
    """A client that has nothing more to send gets the rest of its answers and status OK."""
    driver = Driver(calls)
    client = SessionClient(calls)
    client.start(driver)
    client.send_step(driver.request(open_entry(1, PROMPT)))
    client.finish()
    assert client.call.code() is grpc.StatusCode.OK
    assert pool_of(driver).applied_step_id == 1


def test_release_says_goodbye_to_the_session(calls):
    """A pool that its driver releases ends its session with a goodbye and a status."""
    driver = Driver(calls)
    with session(driver) as client:
        calls.pool.ReleasePool(pool_pb2.ReleasePoolRequest(**driver.key))
        goodbye = client.receive().goodbye
        assert goodbye.reason == errors_pb2.ERROR_REASON_EPOCH_STALE
        assert end_of(client).reason == "EPOCH_STALE"


def test_shutdown_says_goodbye_to_every_session(controller, calls):
    """A controller that ends tells each driver so, and its calls end UNAVAILABLE."""
    clients = []
    for name in ("a", "b"):
        client = SessionClient(calls)
        client.start(Driver(calls, name))
        clients.append(client)
    controller.stop()
    for client in clients:
        assert client.receive().goodbye.reason == errors_pb2.ERROR_REASON_DRAINING
        error = end_of(client)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        client.cancel()


def test_broken_invariant_ends_one_epoch_only(controller, calls, monkeypatch):
    """A pool that fails answers in band, says goodbye and is gone; other pools go on."""
    broken, sound = Driver(calls, "broken"), Driver(calls, "sound")

    def fail(step, *, now_ms):
        raise AssertionError("a secret of ours")

    monkeypatch.setattr(controller.server.registry.pool("broken"), "apply_step", fail)
    with session(broken) as client:
        client.send_step(broken.request())
        error = client.receive().error
        assert error.reason == errors_pb2.ERROR_REASON_INVARIANT_BROKEN
        assert "secret" not in error.message
        assert client.receive().goodbye.reason == errors_pb2.ERROR_REASON_INVARIANT_BROKEN
        end = end_of(client)
    assert (end.code, end.reason) == (grpc.StatusCode.INTERNAL, "INVARIANT_BROKEN")
    assert refused(broken.step).reason == "EPOCH_STALE"
    assert sound.step().step_id == 1
