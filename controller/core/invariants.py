"""The invariants of a pool, as code."""

from prefixd.controller.core.pool import Pool


def check(pool: Pool) -> None:
    """Check every invariant of a pool. Raises InvariantBroken naming what broke.

    Reads the whole pool; cost grows with its blocks.
    """
    raise NotImplementedError
