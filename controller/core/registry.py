"""All pools of one controller, with their drivers, leases and epochs."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from hmac import compare_digest

from prefixd.controller.core import limits, validate
from prefixd.controller.core.errors import (
    EpochStale,
    LimitExceeded,
    NotPoolDriver,
    PoolInUse,
    PoolNotFound,
    SessionActive,
)
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import EVICTION_POLICY_DEFAULT, PoolSpec
from prefixd.controller.core.pool import Pool

ENDED_POOLS_MAX = 4_096
"""Names of ended pools that are remembered, so that their drivers learn that they are stale."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A new epoch of a pool began."""

    epoch: int
    lease_ms: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a pool; `left_ms` is None while a session is open."""

    lease_ms: int
    left_ms: int | None
    session_active: bool


@dataclass(slots=True)
class _Registration:
    pool: Pool
    session_token: bytes
    lease_ms: int
    lease_end_ms: int
    session_active: bool = False


class PoolRegistry:
    """Pools by name; each has one driver, one lease and one epoch.

    Invariants: epochs ascend over all registrations; a name has at most one live epoch; the lease
    of a pool does not run while its session is open. Time comes in as `now_ms`, monotonic.
    `eviction_policy` is that of pools whose specs name none; FieldInvalid where it is not known.
    """

    def __init__(
        self,
        hasher: Hasher,
        *,
        epoch_first: int,
        event_bytes_kept_max: int = limits.EVENT_BYTES_KEPT_MAX,
        eviction_policy: str = EVICTION_POLICY_DEFAULT,
    ) -> None:
        validate.eviction_policy(eviction_policy)
        self.hasher = hasher
        self.eviction_policy = eviction_policy
        self.event_bytes_kept_max = event_bytes_kept_max
        self._epoch_next = epoch_first
        self._registrations: dict[str, _Registration] = {}
        self._ended_epochs: OrderedDict[str, int] = OrderedDict()

    def register(self, spec: PoolSpec, *, session_token: bytes, now_ms: int) -> Registered:
        """Begin an epoch of a pool; a live epoch of this name without a session is superseded.

        Raises FieldInvalid or Unsupported for a bad spec, PoolInUse while the name's session is
        open, LimitExceeded where POOLS_MAX pools are registered.
        """
        if not spec.eviction_policy:
            spec = replace(spec, eviction_policy=self.eviction_policy)
        validate.pool_spec(spec)
        name = spec.pool_name
        old = self._registrations.get(name)
        if old is not None and old.session_active:
            raise PoolInUse(f"pool {name!r} has an open session")
        if old is None and len(self._registrations) >= limits.POOLS_MAX:
            raise LimitExceeded(
                f"{limits.POOLS_MAX} pools are registered", numbers={"pools_max": limits.POOLS_MAX}
            )
        if old is not None:
            self.end_epoch(old.pool)
        lease_ms = limits.LEASE_MS_DEFAULT if spec.lease_ms is None else spec.lease_ms
        pool = Pool(
            spec,
            epoch=self._epoch_next,
            hasher=self.hasher,
            event_bytes_kept_max=self.event_bytes_kept_max,
        )
        self._epoch_next += 1
        self._registrations[name] = _Registration(pool, session_token, lease_ms, now_ms + lease_ms)
        self._ended_epochs.pop(name, None)
        return Registered(pool.epoch, lease_ms, pool)

    def pool(self, pool_name: str) -> Pool:
        """Return a pool for reading. Raises PoolNotFound."""
        return self._registration(pool_name).pool

    def pools(self) -> tuple[Pool, ...]:
        """Return all pools by name."""
        return tuple(self._registrations[name].pool for name in sorted(self._registrations))

    def lease(self, pool_name: str, *, now_ms: int) -> Lease:
        """Return the lease of a pool. Raises PoolNotFound."""
        registration = self._registration(pool_name)
        active = registration.session_active
        left_ms = None if active else max(0, registration.lease_end_ms - now_ms)
        return Lease(registration.lease_ms, left_ms, active)

    def drive(self, *, pool_name: str, epoch: int, session_token: bytes, now_ms: int) -> Pool:
        """Return a pool for its driver and renew its lease.

        Raises PoolNotFound for a name never seen, EpochStale for an epoch that is not the live one,
        NotPoolDriver for a foreign session token.
        """
        registration = self._driven(pool_name, epoch, session_token)
        registration.lease_end_ms = now_ms + registration.lease_ms
        return registration.pool

    def drive_unary(self, *, pool_name: str, epoch: int, session_token: bytes, now_ms: int) -> Pool:
        """Return a pool for a step outside a session. Raises SessionActive, or as `drive`."""
        registration = self._driven(pool_name, epoch, session_token)
        if registration.session_active:
            raise SessionActive(f"pool {pool_name!r} has an open session")
        return self.drive(
            pool_name=pool_name, epoch=epoch, session_token=session_token, now_ms=now_ms
        )

    def begin_session(
        self, *, pool_name: str, epoch: int, session_token: bytes, now_ms: int
    ) -> Pool:
        """Open a pool's session; its lease stands still from now on. Raises as `drive_unary`."""
        pool = self.drive_unary(
            pool_name=pool_name, epoch=epoch, session_token=session_token, now_ms=now_ms
        )
        self._registrations[pool_name].session_active = True
        return pool

    def end_session(self, pool: Pool, *, now_ms: int) -> None:
        """Close a pool's session, which starts its lease; nothing where the epoch has ended."""
        registration = self._registrations.get(pool.spec.pool_name)
        if registration is not None and registration.pool is pool:
            registration.session_active = False
            registration.lease_end_ms = now_ms + registration.lease_ms

    def drain(self, *, pool_name: str, epoch: int, session_token: bytes, now_ms: int) -> int:
        """Refuse new sequences from now on; return how many are open. Raises as `drive`."""
        pool = self.drive(
            pool_name=pool_name, epoch=epoch, session_token=session_token, now_ms=now_ms
        )
        pool.drain()
        return pool.sequence_count

    def set_model_version(
        self,
        model_version: str,
        *,
        pool_name: str,
        epoch: int,
        session_token: bytes,
        now_ms: int,
    ) -> int:
        """Put a version of the weights in force; return the dropped blocks. Raises as `drive`.

        Also raises FieldInvalid where the version is too long.
        """
        validate.model_version(model_version)
        pool = self.drive(
            pool_name=pool_name, epoch=epoch, session_token=session_token, now_ms=now_ms
        )
        return pool.set_model_version(model_version)

    def release(self, *, pool_name: str, epoch: int, session_token: bytes) -> int:
        """End an epoch for its driver; return the sequences that it closed. Raises as `drive`."""
        registration = self._driven(pool_name, epoch, session_token)
        sequence_count = registration.pool.sequence_count
        self.end_epoch(registration.pool)
        return sequence_count

    def end_epoch(self, pool: Pool) -> None:
        """Forget a pool and everything it held; nothing where its epoch has ended."""
        name = pool.spec.pool_name
        registration = self._registrations.get(name)
        if registration is None or registration.pool is not pool:
            return
        del self._registrations[name]
        self._ended_epochs[name] = pool.epoch
        while len(self._ended_epochs) > ENDED_POOLS_MAX:
            self._ended_epochs.popitem(last=False)

    def tick(self, *, now_ms: int) -> tuple[Pool, ...]:
        """End the epochs whose lease has run out and return their pools."""
        expired = tuple(
            registration.pool
            for registration in self._registrations.values()
            if not registration.session_active and registration.lease_end_ms <= now_ms
        )
        for pool in expired:
            self.end_epoch(pool)
        return expired

    def _registration(self, pool_name: str) -> _Registration:
        registration = self._registrations.get(pool_name)
        if registration is None:
            raise PoolNotFound(f"no pool is named {pool_name!r}")
        return registration

    def _driven(self, pool_name: str, epoch: int, session_token: bytes) -> _Registration:
        registration = self._registrations.get(pool_name)
        if registration is None and pool_name not in self._ended_epochs:
            raise PoolNotFound(f"no pool is named {pool_name!r}")
        if registration is None or registration.pool.epoch != epoch:
            raise EpochStale(
                f"epoch {epoch} of pool {pool_name!r} has ended", numbers={"epoch": epoch}
            )
        if not compare_digest(registration.session_token, session_token):
            raise NotPoolDriver(f"another client drives pool {pool_name!r}")
        return registration
