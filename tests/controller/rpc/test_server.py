import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from prefixd.controller.core.limits import MESSAGE_BYTES_MAX
from prefixd.v1 import admin_pb2, cache_pb2, inspect_pb2, pool_pb2
from tests.support.driver import Driver, SessionClient, close_entry, open_entry, refused, session

SERVICES = {
    "prefixd.v1.AdminService",
    "prefixd.v1.CacheService",
    "prefixd.v1.InspectService",
    "prefixd.v1.PoolService",
}


def flush(calls) -> int:
    """Flushes the pool and tells how many blocks were dropped."""
    request = admin_pb2.FlushPoolRequest(pool_name="pool")
    return calls.admin.FlushPool(request).dropped_block_count


def test_health_is_told_per_service(calls):
    """Each service, and the server as a whole, is SERVING; others are not known."""
    health = health_pb2_grpc.HealthStub(calls.channel)
    for service in ("", *SERVICES):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_turns_when_the_controller_drains(controller, calls):
    """A watcher of a service sees NOT_SERVING before the controller is gone."""
    health = health_pb2_grpc.HealthStub(calls.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="prefixd.v1.CacheService"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    controller.stop()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_draining_controller_takes_no_new_work(controller, calls):
    """A controller about to end refuses pools and sessions, and still answers readers."""
    driver = Driver(calls)
    controller.drain()
    client = SessionClient(calls)
    client.send(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**driver.key)))
    errors = [refused(client.receive), refused(lambda: Driver(calls, "new"))]
    client.cancel()
    assert [error.reason for error in errors] == ["DRAINING"] * 2
    assert {error.code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert calls.inspect.ListPools(inspect_pb2.ListPoolsRequest()).pools[0].pool_name == "pool"


def test_reflection_shows_every_service(calls):
    """A client without our protos finds services, methods and messages."""
    database = ProtoReflectionDescriptorDatabase(calls.channel)
    assert set(database.get_services()) > SERVICES
    service = DescriptorPool(database).FindServiceByName("prefixd.v1.CacheService")
    assert {method.name for method in service.methods} == {"Session", "Step", "MatchPrefix"}


def test_s21_flush_of_a_busy_pool_counts_what_is_busy(calls):
    """S21: flush fails while blocks are held or steps unconfirmed, says how many, and why."""
    driver = Driver(calls)
    driver.step(open_entry(1, list(range(9))))
    error = refused(lambda: flush(calls))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BLOCKS_IN_USE")
    assert error.metadata == {"held_block_count": "3", "unconfirmed_step_count": "1"}
    assert error.detail_names == ("ErrorInfo", "PreconditionFailure")
    driver.step(close_entry(1), executed_step_id=0)
    error = refused(lambda: flush(calls))
    assert error.metadata == {"held_block_count": "0", "unconfirmed_step_count": "1"}


def test_s21_flush_of_an_idle_pool_empties_it(calls):
    """S21: flush drops what is cached and keeps the free order; again it drops nothing."""
    driver = Driver(calls, block_count=6)
    driver.step(open_entry(1, list(range(9))))
    driver.step(close_entry(1))
    order = inspect_pb2.ListFreeBlocksRequest(pool_name="pool")
    before = calls.inspect.ListFreeBlocks(order)
    assert (flush(calls), flush(calls)) == (2, 0)
    after = calls.inspect.ListFreeBlocks(order)
    assert list(after.block_ids) == list(before.block_ids) == [3, 4, 5, 2, 1]
    assert after.revision > before.revision
    pool = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool
    assert (pool.free_block_count, pool.evictable_block_count) == (5, 0)


def test_handler_failure_leaves_as_internal_without_its_text(controller, calls, monkeypatch):
    """An exception of ours is INTERNAL / INTERNAL_FAILURE; its text stays in the log."""
    driver = Driver(calls)

    def fail(pool_name):
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(controller.server.registry, "pool", fail)
    error = refused(
        lambda: calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name=driver.pool_name))
    )
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_FAILURE")
    assert "secret" not in error.message
    failures = [event for event in controller.log_events if event["event"] == "rpc_failed"]
    assert "a secret of ours" in failures[0]["exception"]


def test_unknown_method_is_unimplemented(calls):
    """A method that does not exist ends as gRPC says it."""
    call = calls.channel.unary_unary("/prefixd.v1.CacheService/Guess")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["CacheService/Step", "InspectService/ListPools"])
def test_unreadable_message_is_a_typed_error(controller, calls, method):
    """Bytes that are no message are the caller's fault, and no failure of ours."""
    call = calls.channel.unary_unary(f"/prefixd.v1.{method}")
    error = refused(lambda: call(b"\xff\xff"))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert "rpc_failed" not in {event["event"] for event in controller.log_events}


def test_unreadable_message_ends_a_session_only(controller, calls):
    """A session that sends bytes which are no message ends; its pool stays."""
    driver = Driver(calls)
    start = cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**driver.key))
    call = calls.channel.stream_stream("/prefixd.v1.CacheService/Session")
    error = refused(lambda: list(call(iter([start.SerializeToString(), b"\xff\xff"]))))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert "rpc_failed" not in {event["event"] for event in controller.log_events}
    assert driver.step().step_id == 1


def test_oversized_message_is_refused(calls):
    """A message above the limit never reaches the core, and the server goes on."""
    driver = Driver(calls)
    too_many = open_entry(1, bytes(MESSAGE_BYTES_MAX // 4))
    with pytest.raises(grpc.RpcError) as raised:
        calls.cache.Step(driver.request(too_many))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert driver.step().step_id == 1


def test_log_holds_no_token_id_and_no_secret(controller, calls):
    """Lifecycle and debug lines name pools and steps, never tokens or session tokens."""
    driver = Driver(calls)
    with session(driver) as client:
        client.step(driver.request(open_entry(1, [987_654_321])))
    refused(
        lambda: calls.pool.RenewPool(
            pool_pb2.RenewPoolRequest(**(driver.key | {"session_token": b"guess"}))
        )
    )
    text = controller.log_text.getvalue()
    events = {event["event"] for event in controller.log_events}
    assert {"controller_started", "pool_registered", "session_started", "rpc"} <= events
    assert "987654321" not in text
    assert "guess" not in text
    assert driver.registered.session_token.hex() not in text


def test_other_pools_are_served_while_a_million_tokens_are_hashed(controller, calls):
    """A 1M-token admission hashes in slices; another pool's steps are answered in between."""
    large = Driver(calls, "large", block_count=70_000, block_size=16)
    small = Driver(calls, "small")
    pool = controller.server.registry.pool("large")
    with session(large) as client, session(small) as other:
        client.step(large.request(open_entry(1, range(1_000_000))))
        answered = 0
        while controller.call(lambda: controller.server.hashing.is_busy(pool)):
            other.step(cache_pb2.StepRequest(step_id=answered + 1, executed_step_id=answered))
            answered += 1
    assert answered > 10
