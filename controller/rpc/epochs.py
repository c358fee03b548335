"""The end of an epoch, wherever it comes from."""

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.typing import FilteringBoundLogger

from prefixd.controller.core.errors import CacheError, EpochStale, InvariantBroken
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.sessions import OpenSessions
from prefixd.controller.rpc.watchers import Watchers, epoch_ended


class Epochs:
    """Ends epochs: their sessions get a goodbye, their watchers an error, and the log a line."""

    def __init__(
        self,
        registry: PoolRegistry,
        sessions: OpenSessions,
        watchers: Watchers,
        log: FilteringBoundLogger,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._watchers = watchers
        self._log = log

    @contextmanager
    def ended_by_failure(self, pool: Pool) -> Iterator[None]:
        """Ends the pool's epoch where the core fails inside the block; other pools go on.

        Typed errors pass: whoever raised one has changed nothing. Anything else may have left half
        a change, so it is raised as InvariantBroken. Whatever changes a pool runs in such a block,
        so its watchers look for events behind it.
        """
        try:
            yield
            self._watchers.notify(pool)
        except InvariantBroken as error:
            self._end_broken(pool, error, error)
            raise
        except CacheError:
            raise
        except Exception as error:
            broken = InvariantBroken(
                f"pool {pool.spec.pool_name} failed and its epoch has ended; register it again"
            )
            self._end_broken(pool, broken, error)
            raise broken from error

    def expire_leases(self, *, now_ms: int) -> None:
        """Ends the epochs whose lease ran out."""
        for pool in self._registry.tick(now_ms=now_ms):
            self._log.info("lease_expired", pool_name=pool.spec.pool_name, epoch=pool.epoch)
            self._watchers.end_epoch(pool.spec.pool_name, pool.epoch, epoch_ended(pool))

    def began(self, pool: Pool) -> None:
        """Ends what belongs to earlier epochs of a pool that was just registered."""
        self._watchers.end_older(pool)

    def released(self, pool_name: str, epoch: int) -> None:
        """Tells the session and the watchers of an epoch that its driver released it."""
        self._log.info("pool_released", pool_name=pool_name, epoch=epoch)
        reason = EpochStale(f"epoch {epoch} was released", numbers={"epoch": epoch})
        self._sessions.end(epoch, reason)
        self._watchers.end_epoch(pool_name, epoch, reason)

    def _end_broken(self, pool: Pool, broken: InvariantBroken, cause: Exception) -> None:
        self._log.error(
            "invariant_broken", pool_name=pool.spec.pool_name, epoch=pool.epoch, exc_info=cause
        )
        self._registry.end_epoch(pool)
        self._sessions.end(pool.epoch, broken)
        self._watchers.end_epoch(pool.spec.pool_name, pool.epoch, broken)
