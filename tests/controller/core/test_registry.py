"""Pools, drivers, leases and epochs (section 4.1 of the design)."""

from typing import Any

import pytest

from prefixd.controller.core import limits
from prefixd.controller.core.errors import (
    EpochStale,
    FieldInvalid,
    LimitExceeded,
    NotPoolDriver,
    PoolInUse,
    PoolNotFound,
    SessionActive,
    Unsupported,
)
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import GroupKind, GroupSpec, PoolSpec, Step, StepId
from prefixd.controller.core.registry import PoolRegistry, Registered
from tests.controller.core.driver import open_entry

SECRET = b"secret"


@pytest.fixture
def registry() -> PoolRegistry:
    """A registry whose first epoch is 100."""
    return PoolRegistry(Hasher("sha256_cbor", seed="0"), epoch_first=100)


def register(registry: PoolRegistry, now_ms: int = 0, **spec: Any) -> Registered:
    """Registers a pool of ten blocks."""
    fields = {"pool_name": "p", "block_count": 11, "lease_ms": 1_000, **spec}
    return registry.register(PoolSpec(**fields), session_token=SECRET, now_ms=now_ms)


def driver_of(registered: Registered, **changes: Any) -> dict[str, Any]:
    """Returns what a driver's call carries."""
    return {
        "pool_name": registered.pool.spec.pool_name,
        "epoch": registered.epoch,
        "session_token": SECRET,
        **changes,
    }


def test_registering_begins_an_epoch(registry: PoolRegistry) -> None:
    """Epochs ascend over all pools; the lease is the one asked for, or the default."""
    first = register(registry)
    second = register(registry, pool_name="q", lease_ms=None)
    assert (first.epoch, second.epoch) == (100, 101)
    assert (first.lease_ms, second.lease_ms) == (1_000, limits.LEASE_MS_DEFAULT)
    assert [pool.spec.pool_name for pool in registry.pools()] == ["p", "q"]


def test_a_foreign_token_does_not_drive(registry: PoolRegistry) -> None:
    """Every mutating call is refused, the release too."""
    registered = register(registry)
    foreign = driver_of(registered, session_token=b"guess")
    for call in (registry.drive, registry.begin_session, registry.drain):
        with pytest.raises(NotPoolDriver):
            call(**foreign, now_ms=0)
    with pytest.raises(NotPoolDriver):
        registry.release(**foreign)
    assert registry.pool("p") is registered.pool


def test_an_unknown_pool_is_not_found(registry: PoolRegistry) -> None:
    """For reading and for driving."""
    with pytest.raises(PoolNotFound):
        registry.pool("nobody")
    with pytest.raises(PoolNotFound):
        registry.drive(pool_name="nobody", epoch=1, session_token=SECRET, now_ms=0)
    with pytest.raises(PoolNotFound):
        registry.release(pool_name="nobody", epoch=1, session_token=SECRET)


def test_an_older_epoch_is_stale(registry: PoolRegistry) -> None:
    """A newcomer without an open session in its way supersedes the pool."""
    old = register(registry)
    new = register(registry)
    assert new.epoch > old.epoch
    with pytest.raises(EpochStale):
        registry.drive(**driver_of(old), now_ms=0)
    assert registry.drive(**driver_of(new), now_ms=0) is new.pool


def test_a_name_with_an_open_session_is_in_use(registry: PoolRegistry) -> None:
    """Until the stream is lost; then the newcomer supersedes it."""
    old = register(registry)
    registry.begin_session(**driver_of(old), now_ms=0)
    with pytest.raises(PoolInUse):
        register(registry)
    registry.end_session(old.pool, now_ms=5)
    register(registry, now_ms=6)


def test_one_session_at_a_time(registry: PoolRegistry) -> None:
    """While it is open, unary steps and second sessions are refused; renewing is not."""
    registered = register(registry)
    registry.begin_session(**driver_of(registered), now_ms=0)
    with pytest.raises(SessionActive):
        registry.begin_session(**driver_of(registered), now_ms=0)
    with pytest.raises(SessionActive):
        registry.drive_unary(**driver_of(registered), now_ms=0)
    assert registry.drive(**driver_of(registered), now_ms=0) is registered.pool


def test_a_lease_runs_out(registry: PoolRegistry) -> None:
    """The epoch ends with everything it held; its driver learns that it is stale."""
    registered = register(registry)
    registered.pool.apply_step(Step(StepId(1), StepId(0), (open_entry(1, [1]),)), now_ms=0)
    assert registry.tick(now_ms=999) == ()
    assert registry.tick(now_ms=1_000) == (registered.pool,)
    with pytest.raises(PoolNotFound):
        registry.pool("p")
    with pytest.raises(EpochStale):
        registry.drive(**driver_of(registered), now_ms=1_000)
    assert register(registry).pool.sequence_count == 0


def test_any_call_of_the_epoch_renews_the_lease(registry: PoolRegistry) -> None:
    """It then runs from that call on."""
    registered = register(registry)
    registry.drive(**driver_of(registered), now_ms=900)
    assert registry.tick(now_ms=1_899) == ()
    assert registry.lease("p", now_ms=1_800).left_ms == 100
    assert registry.tick(now_ms=1_900) == (registered.pool,)


def test_a_refused_call_does_not_renew_the_lease(registry: PoolRegistry) -> None:
    """A stranger cannot keep a pool alive."""
    registered = register(registry)
    with pytest.raises(NotPoolDriver):
        registry.drive(**driver_of(registered, session_token=b"guess"), now_ms=900)
    assert registry.tick(now_ms=1_000) == (registered.pool,)


def test_the_lease_stands_still_while_a_session_is_open(registry: PoolRegistry) -> None:
    """Losing the stream starts it; coming back in time resumes the epoch."""
    registered = register(registry)
    registry.begin_session(**driver_of(registered), now_ms=0)
    assert registry.tick(now_ms=1_000_000) == ()
    assert registry.lease("p", now_ms=1_000_000).left_ms is None
    registry.end_session(registered.pool, now_ms=1_000_000)
    assert registry.tick(now_ms=1_000_999) == ()
    assert registry.begin_session(**driver_of(registered), now_ms=1_000_999) is registered.pool


def test_the_end_of_a_superseded_session_touches_nothing(registry: PoolRegistry) -> None:
    """The newcomer's lease and session are its own."""
    old = register(registry)
    registry.begin_session(**driver_of(old), now_ms=0)
    registry.end_epoch(old.pool)
    new = register(registry, now_ms=10)
    registry.begin_session(**driver_of(new), now_ms=10)
    registry.end_session(old.pool, now_ms=20)
    assert registry.lease("p", now_ms=20).session_active


def test_releasing_ends_the_epoch(registry: PoolRegistry) -> None:
    """It tells how many sequences it closed; afterwards the epoch is stale."""
    registered = register(registry)
    registered.pool.apply_step(Step(StepId(1), StepId(0), (open_entry(1, [1]),)), now_ms=0)
    assert registry.release(**driver_of(registered)) == 1
    with pytest.raises(EpochStale):
        registry.release(**driver_of(registered))


def test_releasing_an_old_epoch_leaves_the_new_one(registry: PoolRegistry) -> None:
    """A late release of a superseded driver is harmless."""
    old = register(registry)
    new = register(registry)
    with pytest.raises(EpochStale):
        registry.release(**driver_of(old))
    assert registry.pool("p") is new.pool


def test_draining_tells_how_many_are_open(registry: PoolRegistry) -> None:
    """New sequences are refused from then on."""
    registered = register(registry)
    registered.pool.apply_step(Step(StepId(1), StepId(0), (open_entry(1, [1]),)), now_ms=0)
    assert registry.drain(**driver_of(registered), now_ms=0) == 1
    assert registered.pool.draining


def test_setting_a_version_reaches_the_pool(registry: PoolRegistry) -> None:
    """A version that is too long is refused before anything is looked up."""
    registered = register(registry)
    registry.set_model_version("2", **driver_of(registered), now_ms=0)
    assert registered.pool.model_version == "2"
    with pytest.raises(FieldInvalid, match="model_version"):
        registry.set_model_version("v" * 257, **driver_of(registered), now_ms=0)


def test_pools_are_bounded(registry: PoolRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known name may still be registered again."""
    monkeypatch.setattr(limits, "POOLS_MAX", 2)
    register(registry, pool_name="a")
    register(registry, pool_name="b")
    with pytest.raises(LimitExceeded):
        register(registry, pool_name="c")
    register(registry, pool_name="b")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"pool_name": ""}, "pool_name"),
        ({"pool_name": "a b"}, "pool_name"),
        ({"pool_name": "a" * 129}, "pool_name"),
        ({"block_count": 1}, "block_count"),
        ({"block_count": 2**31}, "block_count"),
        ({"block_count": limits.BLOCK_COUNT_MAX + 1, "block_size": 1}, "block_count"),
        ({"kv_format": "x" * 4_097}, "kv_format"),
        ({"worker_address": "x" * 4_097}, "worker_address"),
        ({"groups": (GroupSpec(layer_count=-1),)}, "groups[0].layer_count"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": limits.BLOCK_SIZE_MAX + 1}, "block_size"),
        ({"vocabulary_size": -1}, "vocabulary_size"),
        ({"lease_ms": 99}, "lease"),
        ({"lease_ms": limits.LEASE_MS_MAX + 1}, "lease"),
        ({"model_version": "v" * 257}, "model_version"),
        (
            {"groups": (GroupSpec(window_token_count=5),)},
            "groups[0].window_token_count",
        ),
        (
            {"groups": (GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW))},
            "groups[1].window_token_count",
        ),
        ({"groups": (GroupSpec(),) * (limits.GROUPS_PER_POOL_MAX + 1)}, "groups"),
    ],
)
def test_a_bad_spec_is_refused(registry: PoolRegistry, spec: dict[str, Any], field: str) -> None:
    """The error names the field; no epoch begins."""
    with pytest.raises(FieldInvalid) as caught:
        register(registry, **spec)
    assert caught.value.field == field
    assert registry.pools() == ()


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (GroupSpec(), GroupSpec(GroupKind.STATE_SPACE)),
        (GroupSpec(GroupKind.SLIDING_WINDOW, window_token_count=64),),
        (GroupSpec(GroupKind.STATE_SPACE),),
    ],
)
def test_other_groups_are_not_offered(
    registry: PoolRegistry, groups: tuple[GroupSpec, ...]
) -> None:
    """A full-attention group comes first, and none has a state."""
    with pytest.raises(Unsupported) as caught:
        register(registry, groups=groups)
    assert caught.value.field == "groups"


def test_s23_several_groups_may_have_every_option(registry: PoolRegistry) -> None:
    """Matches inside a block and merging are those of each group."""
    groups = (GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, window_token_count=64))
    options = {"sub_block_reuse": True, "merge_duplicates": True}
    assert register(registry, groups=groups, **options).pool.spec.groups == groups
