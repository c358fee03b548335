"""A live check of a pool's invariants, with a count of what was checked."""

from dataclasses import dataclass

from prefixd.controller.core import invariants
from prefixd.controller.core.pool import Pool

INVARIANTS = (
    "every block is the null block, free, evictable, or held by a table",
    "no block stands for two places of the index",
    "reference counts equal table memberships",
    "no slot is writable by two sequences",
    "tables stand on places with their own tokens and extra keys",
    "full blocks of cacheable sequences are in the index",
    "a published block's parent is published",
    "descendants are handed out before their ancestors",
    "pending blocks belong to unconfirmed steps",
    "twins are known to the tables that have them",
    "published blocks have digests, and digests equal their content's",
    "counters equal what they count",
)
"""What `audit` checks, in words."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was checked and found in order."""

    block_count: int
    cached_block_count: int
    digest_count: int
    sequence_count: int


def audit(pool: Pool) -> Audit:
    """Check every invariant of a pool. Raises InvariantBroken naming what broke.

    Missing digests are computed first, so that all of them are compared. Cost grows with the pool's
    blocks.
    """
    pool.hash_all()
    invariants.check(pool)
    state = pool.state
    cached_block_count = state.published_block_count + state.pending_block_count
    return Audit(
        block_count=pool.spec.block_count - 1,
        cached_block_count=cached_block_count,
        digest_count=cached_block_count,
        sequence_count=pool.sequence_count,
    )
