import pytest

from prefixd.v1 import inspect_pb2, pool_pb2
from tests.support.driver import Driver, close_entry, open_entry, refused, session

LEASE_MS = 15_000


def pool_of(calls) -> inspect_pb2.Pool:
    """The only pool's accounts."""
    return calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool


def test_registration_tells_the_driver_its_terms(calls):
    """A driver learns its epoch, its secret, and the limits in force."""
    registered = Driver(calls).registered
    assert registered.epoch > 0
    assert len(registered.session_token) == 16
    assert (registered.block_size, registered.hash_algorithm) == (4, "sha256_cbor")
    assert registered.lease.ToMilliseconds() == LEASE_MS
    assert (registered.steps_in_flight_max, registered.tokens_per_sequence_max) == (4, 4_194_304)


def test_newcomer_supersedes_a_pool_without_a_session(calls):
    """Registering a name again begins a later epoch; the older driver is told that it is stale."""
    old = Driver(calls)
    old.step(open_entry(1, [1, 2, 3]))
    new = Driver(calls)
    assert new.registered.epoch > old.registered.epoch
    assert refused(old.step).reason == "EPOCH_STALE"
    assert pool_of(calls).sequence_count == 0


def test_name_with_an_open_session_is_in_use(calls):
    """While its session is open a pool's name cannot be taken."""
    with session(Driver(calls)):
        error = refused(lambda: Driver(calls))
    assert error.reason == "POOL_IN_USE"


def test_any_message_of_the_epoch_renews_the_lease(controller, calls):
    """A step and a renewal both start the lease afresh."""
    driver = Driver(calls)
    controller.expire_leases(advance_ms=LEASE_MS - 1)
    driver.step()
    controller.expire_leases(advance_ms=LEASE_MS - 1)
    renewed = calls.pool.RenewPool(pool_pb2.RenewPoolRequest(**driver.key))
    assert renewed.lease.ToMilliseconds() == LEASE_MS
    controller.expire_leases(advance_ms=LEASE_MS - 1)
    assert pool_of(calls).lease_left.ToMilliseconds() == 1


def test_expired_lease_leaves_nothing_held(controller, calls):
    """A driver that stays away loses its epoch; a new one finds every block free."""
    old = Driver(calls)
    old.step(open_entry(1, [1, 2, 3, 4, 5]))
    controller.expire_leases(advance_ms=LEASE_MS)
    error = refused(lambda: pool_of(calls))
    assert error.reason == "POOL_NOT_FOUND"
    assert refused(old.step).reason == "EPOCH_STALE"
    Driver(calls)
    pool = pool_of(calls)
    assert (pool.held_block_count, pool.free_block_count) == (0, 63)


def test_lease_can_be_chosen(controller, calls):
    """A lease that the driver names is the one in force."""
    Driver(calls, lease={"nanos": 250_000_000})
    controller.expire_leases(advance_ms=249)
    assert pool_of(calls).lease.ToMilliseconds() == 250
    controller.expire_leases(advance_ms=1)
    assert refused(lambda: pool_of(calls)).reason == "POOL_NOT_FOUND"


def test_draining_pool_refuses_new_sequences_only(calls):
    """A draining pool goes on with open sequences and takes no more."""
    driver = Driver(calls)
    driver.step(open_entry(1, [1, 2, 3]))
    drained = calls.pool.DrainPool(pool_pb2.DrainPoolRequest(**driver.key))
    assert drained.sequence_count == 1
    response = driver.step(open_entry(2, [1]), close_entry(1))
    assert [outcome.WhichOneof("outcome") for outcome in response.outcomes] == ["refusal", "close"]
    assert pool_of(calls).draining


def test_released_pool_is_gone_and_release_is_idempotent(calls):
    """A release closes what is open; sent again it closes nothing more."""
    driver = Driver(calls)
    driver.step(open_entry(1, [1, 2, 3]))
    request = pool_pb2.ReleasePoolRequest(**driver.key)
    assert calls.pool.ReleasePool(request).closed_sequence_count == 1
    assert calls.pool.ReleasePool(request).closed_sequence_count == 0
    assert refused(lambda: pool_of(calls)).reason == "POOL_NOT_FOUND"


def test_release_of_a_stale_epoch_ends_no_session(calls):
    """Another pool's epoch under a known name, which anybody can read, ends nobody's session."""
    Driver(calls, pool_name="known")
    victim = Driver(calls)
    with session(victim) as client:
        calls.pool.ReleasePool(
            pool_pb2.ReleasePoolRequest(pool_name="known", epoch=victim.registered.epoch)
        )
        assert client.step(victim.request(open_entry(1, [1, 2, 3]))).step_id == 1


@pytest.mark.parametrize("call_name", ["RenewPool", "DrainPool", "ReleasePool", "SetModelVersion"])
def test_foreign_token_drives_nothing(calls, call_name):
    """Without the pool's secret every mutating call is refused and changes nothing."""
    driver = Driver(calls)
    before = pool_of(calls)
    request = getattr(pool_pb2, f"{call_name}Request")(
        **(driver.key | {"session_token": b"another token..."})
    )
    assert refused(lambda: getattr(calls.pool, call_name)(request)).reason == "NOT_POOL_DRIVER"
    assert pool_of(calls) == before
