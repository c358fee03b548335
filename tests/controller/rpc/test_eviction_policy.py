"""Choosing a pool's eviction policy, and hints over gRPC (S20)."""

import pytest

from prefixd.controller.addresses import address
from prefixd.controller.config import Config, ConfigInvalid
from prefixd.v1 import cache_pb2, inspect_pb2
from tests.support.controller import controller_thread, stubs
from tests.support.driver import Driver, close_entry, open_entry, refused


def policy_of(calls, pool_name="pool") -> str:
    """The policy of a pool, as it is shown."""
    return calls.inspect.GetPool(
        inspect_pb2.GetPoolRequest(pool_name=pool_name)
    ).pool.eviction_policy


def test_s20_a_driver_names_the_policy_of_its_pool(calls):
    """S20: or takes the controller's default; both are shown, and told to the driver."""
    assert Driver(calls).registered.eviction_policy == policy_of(calls) == "lru"
    assert Driver(calls, eviction_policy="retention").registered.eviction_policy == "retention"
    assert policy_of(calls) == "retention"


def test_s20_the_controllers_option_is_the_default_of_its_pools():
    """S20: `--eviction-policy`; what there is stands in the server's description."""
    config = Config(listen=(address("127.0.0.1:0"),), eviction_policy="retention")
    with controller_thread(config) as running, stubs(running.address) as calls:
        assert Driver(calls).registered.eviction_policy == "retention"
        assert Driver(calls, eviction_policy="lru").registered.eviction_policy == "lru"
        info = calls.inspect.GetServerInfo(inspect_pb2.GetServerInfoRequest())
    assert info.eviction_policy == "retention"
    assert list(info.eviction_policies) == ["lru", "retention"]


def test_s20_an_unknown_policy_is_refused_with_the_known_ones(calls):
    """S20: at registration and at the controller's start."""
    error = refused(lambda: Driver(calls, eviction_policy="fifo"))
    assert error.reason == "FIELD_INVALID"
    assert "'fifo', not one of lru, retention" in error.message
    with pytest.raises(ConfigInvalid, match="'fifo', not one of lru, retention"):
        Config(eviction_policy="fifo").check()


def test_s20_hints_of_open_and_close_travel(calls):
    """S20: what is over goes first, whether the open or the close says so."""
    driver = Driver(calls, eviction_policy="retention", block_count=20)
    over = cache_pb2.RetentionHint(continuation=cache_pb2.CONTINUATION_OVER)
    driver.step(open_entry(1, [1] * 5))
    driver.step(open_entry(2, [2] * 5, retention_hint=over))
    driver.step(open_entry(3, [3] * 5))
    for handle, hint in ((1, None), (2, None), (3, over)):
        driver.step(close_entry(handle, retention_hint=hint))
    driver.step()
    order = calls.inspect.ListFreeBlocks(inspect_pb2.ListFreeBlocksRequest(pool_name="pool"))
    assert list(order.block_ids)[-3:] == [3, 5, 1]


@pytest.mark.parametrize("name", ["open", "close"])
def test_s20_an_unknown_continuation_is_refused(calls, name):
    """S20: the error names the field from the step on."""
    driver = Driver(calls)
    driver.step(open_entry(1, [1] * 5))
    hint = cache_pb2.RetentionHint(continuation=9)
    entry = {
        "open": lambda: open_entry(2, [1] * 5, retention_hint=hint),
        "close": lambda: close_entry(1, retention_hint=hint),
    }[name]()
    error = refused(lambda: driver.step(entry))
    assert error.reason == "FIELD_INVALID"
    assert f"entries[0].{name}.retention_hint.continuation" in error.message
