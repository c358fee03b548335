"""What is claimed of one run of cached blocks (rule S20)."""

from __future__ import annotations

from math import inf
from operator import ge
from typing import TYPE_CHECKING

from prefixd.controller.core.policies.policy import Claim

if TYPE_CHECKING:
    from prefixd.controller.core.free_order import CachedRun


class StandingClaim:
    """A closed sequence's claim at the run where the sequence ended.

    `run` is None once the claim is gone. `serial` ascends with the time at which it was made.
    """

    __slots__ = ("band", "band_once_used", "run", "serial", "until_ms")

    def __init__(self, claim: Claim, *, serial: int) -> None:
        self.band = claim.band
        self.until_ms = claim.until_ms
        self.band_once_used = claim.band_once_used
        self.serial = serial
        self.run: CachedRun | None = None

    def strength(self) -> tuple[float, ...]:
        """Return what claims at one place are compared by: the band, then how long it stands,
        then what use leaves of it, then the age."""
        until = inf if self.until_ms is None else self.until_ms
        once_used = -1 if self.band_once_used is None else self.band_once_used
        return (self.band, until, once_used, -self.serial)

    def outdoes(self, other: StandingClaim) -> bool:
        """Tell whether this claim, of a place behind the other's, is at no time the lower one."""
        return all(map(ge, self.strength()[:3], other.strength()[:3]))


class RunClaims:
    """The claims that a run's band follows from.

    `claim` stands at the run's end, and `has_parted` says that sequences have parted there;
    `bands_behind` counts the bands of the node's children. `band` is the highest of all these, None
    where there is none.
    """

    __slots__ = ("band", "bands_behind", "claim", "has_parted")

    def __init__(self) -> None:
        self.band: int | None = None
        self.bands_behind: dict[int, int] = {}
        self.claim: StandingClaim | None = None
        self.has_parted = False

    @property
    def marks_end(self) -> bool:
        """Whether something is said of the run's very end, so that it must remain an end."""
        return self.claim is not None or self.has_parted

    def recount(self, before: int | None, after: int | None) -> None:
        """Say that a child's band is another one; None: nothing is claimed there."""
        counts = self.bands_behind
        if before is not None:
            counts[before] -= 1
            if counts[before] == 0:
                del counts[before]
        if after is not None:
            counts[after] = counts.get(after, 0) + 1

    def highest(self, *, parted_band: int) -> int | None:
        """Compute `band`; `parted_band` is the least one where sequences have parted."""
        band = max(self.bands_behind, default=None)
        if self.claim is not None:
            band = self.claim.band if band is None else max(band, self.claim.band)
        if band is not None and self.has_parted:
            return max(band, parted_band)
        return band
