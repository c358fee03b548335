"""The end of an epoch, wherever it comes from."""

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.typing import FilteringBoundLogger

from prefixd.controller.core.errors import CacheError, EpochStale, InvariantBroken
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.registry import PoolRegistry
from prefixd.controller.rpc.sessions import OpenSessions


class Epochs:
    """Ends epochs: their sessions get a goodbye, and the log a line."""

    def __init__(
        self, registry: PoolRegistry, sessions: OpenSessions, log: FilteringBoundLogger
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._log = log

    @contextmanager
    def ended_by_failure(self, pool: Pool) -> Iterator[None]:
        """Ends the pool's epoch where the core fails inside the block; other pools go on.

        Typed errors pass: whoever raised one has changed nothing. Anything else may have left half
        a change, so it is raised as InvariantBroken.
        """
        try:
            yield
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

    def released(self, pool_name: str, epoch: int) -> None:
        """Tells the session of an epoch that its driver released it."""
        self._log.info("pool_released", pool_name=pool_name, epoch=epoch)
        self._sessions.end(
            epoch, EpochStale(f"epoch {epoch} was released", numbers={"epoch": epoch})
        )

    def _end_broken(self, pool: Pool, broken: InvariantBroken, cause: Exception) -> None:
        self._log.error(
            "invariant_broken", pool_name=pool.spec.pool_name, epoch=pool.epoch, exc_info=cause
        )
        self._registry.end_epoch(pool)
        self._sessions.end(pool.epoch, broken)
