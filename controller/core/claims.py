"""The claims of closed sequences, and the band of the free order that each run has by them (S20).

A claim stands at the place where its sequence ended. The band of a run is the highest of those
claimed at its end and behind it, so no run is handed out before what is cached behind it (S19).
When the block at a claim's place is evicted or dropped, the claim stands at the place before it:
what is left of a prefix is worth what the whole was, and no other run changes its band.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from prefixd.controller.core.free_order import CachedRun, FreeOrder
from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.messages import CloseReason
from prefixd.controller.core.node import Lane, Node
from prefixd.controller.core.policies.policy import Claim, EvictionPolicy
from prefixd.controller.core.run_claims import RunClaims, StandingClaim
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.window_blocks import WindowBlock

GONE_CLAIMS_MIN = 64
"""Claims that are gone and still wait for their end, from which on they are swept out."""
ENDS_PER_STEP_MAX = 256
"""Ends of claims that one step sees to: after a quiet night there may be one for every run."""


class Claims:
    """The standing claims of one pool.

    Invariants: `run.claims.band` is the highest band claimed at a run's end and behind it, and at
    least the policy's `unclaimed_band` where sequences have parted; None where nothing is claimed.
    A run that is linked in the free order has claims, and stands in its band. Under a policy with
    one band no run has any, for they would make no difference.
    """

    def __init__(self, policy: EvictionPolicy, order: FreeOrder) -> None:
        self.has_bands = policy.band_count > 1
        self._policy = policy
        self._order = order
        self._serial = 0
        self._ends: list[tuple[int, int, StandingClaim]] = []
        self._ending_count = 0

    @property
    def waiting_count(self) -> int:
        """Claims that wait for their end, with those that are gone and not swept out yet."""
        return len(self._ends)

    def ending(self) -> Iterator[StandingClaim]:
        """Walk the claims that stand until some time."""
        return (claim for _, _, claim in self._ends if claim.run is not None)

    # Sequences.

    def close(
        self, sequence: Sequence, hint: RetentionHint, *, reason: CloseReason, now_ms: int
    ) -> None:
        """Let a sequence that is about to be released claim its blocks."""
        if not self.has_bands:
            return
        claim = self._policy.claim(hint, reason=reason, now_ms=now_ms)
        if sequence.leaf is not None:
            self._add(sequence.leaf.lane, claim)
            self._forget_outdone(sequence.leaf)
        for table in sequence.window_tables.values():
            for block in table.held():
                self._add(block, claim)

    def use(self, runs: Iterable[CachedRun]) -> None:
        """Say that a sequence goes on behind runs, which are held now."""
        if not self.has_bands:
            return
        for run in runs:
            if run.claims is not None and run.claims.claim is not None:
                self._answer(run, run.claims, run.claims.claim)

    # Places.

    def place(self, run: CachedRun) -> None:
        """Choose the band of an idle run that is about to be linked."""
        if not self.has_bands:
            return
        if run.claims is None or run.claims.band is None:
            self._add(run, Claim(self._policy.unclaimed_band))
        assert run.claims is not None
        assert run.claims.band is not None
        run.band = run.claims.band

    def part(self, node: Node) -> None:
        """Say that a second sequence goes on behind a node's end otherwise than the first."""
        if self.has_bands:
            _claims_of(node.lane).has_parted = True
            self._reckon(node.lane)

    def leave(self, node: Node) -> None:
        """Say that a node has left the index; what is claimed there is now at its parent's end."""
        claims = node.lane.claims
        node.lane.claims = None
        if claims is None:
            return
        if not isinstance(node.parent, Node):
            if claims.claim is not None:
                self._forget(claims.claim)
            return
        lane = node.parent.lane
        above = _claims_of(lane)
        above.recount(claims.band, None)
        above.has_parted |= claims.has_parted
        if claims.claim is not None:
            self._settle(lane, claims.claim)
        self._reckon(lane)

    def leave_window(self, block: WindowBlock) -> None:
        """Say that a window block has left the index."""
        if block.claims is not None and block.claims.claim is not None:
            self._forget(block.claims.claim)
        block.claims = None

    def clear(self) -> None:
        """Forget all claims: the index is empty."""
        for _, _, claim in self._ends:
            claim.run = None
            claim.until_ms = None
        self._ends.clear()
        self._ending_count = 0

    # Time.

    def lapse(self, *, now_ms: int) -> None:
        """End the claims whose time is over, in the order of their ends and of being made; where
        there are more than ENDS_PER_STEP_MAX, later calls go on."""
        for _ in range(ENDS_PER_STEP_MAX):
            if not self._ends or self._ends[0][0] > now_ms:
                return
            _, _, claim = heappop(self._ends)
            if claim.run is None:
                continue
            self._ending_count -= 1
            claim.until_ms = None
            claim.band_once_used = None
            claim.band = min(claim.band, self._policy.unclaimed_band)
            self._reckon(claim.run)

    # Standing claims.

    def _add(self, run: CachedRun, claim: Claim) -> None:
        self._serial += 1
        standing = StandingClaim(claim, serial=self._serial)
        if standing.until_ms is not None:
            heappush(self._ends, (standing.until_ms, standing.serial, standing))
            self._ending_count += 1
        self._settle(run, standing)
        self._reckon(run)

    def _forget_outdone(self, leaf: Node) -> None:
        """Forget what is claimed before a place and can make no difference beside the claim there,
        so that the turns of a conversation leave no seams in the index."""
        claims = leaf.lane.claims
        assert claims is not None
        assert claims.claim is not None
        node = leaf.parent
        while isinstance(node, Node):
            before = node.lane.claims
            node = node.parent
            if before is None or before.claim is None:
                continue
            if claims.claim.outdoes(before.claim):
                self._forget(before.claim)
                before.claim = None

    def _settle(self, run: CachedRun, claim: StandingClaim) -> None:
        """Let a claim stand at a run; of two that would, the stronger one does."""
        claims = _claims_of(run)
        other = claims.claim
        if other is not None and other.strength() > claim.strength():
            self._forget(claim)
            return
        claims.claim = claim
        claim.run = run
        if other is not None:
            self._forget(other)

    def _answer(self, run: CachedRun, claims: RunClaims, claim: StandingClaim) -> None:
        if claim.band_once_used is None:
            claims.claim = None
            self._forget(claim)
        else:
            claim.band = claim.band_once_used
        self._reckon(run)

    def _forget(self, claim: StandingClaim) -> None:
        claim.run = None
        if claim.until_ms is None:
            return
        self._ending_count -= 1
        if len(self._ends) > GONE_CLAIMS_MIN + 2 * self._ending_count:
            self._ends = [one for one in self._ends if one[2].run is not None]
            heapify(self._ends)

    # Bands.

    def band_of(self, claims: RunClaims) -> int | None:
        """Compute the band that follows from a run's claims."""
        return claims.highest(parted_band=self._policy.unclaimed_band)

    def _reckon(self, run: CachedRun) -> None:
        """Compute the band of a run, and of those that it stands behind as far as it changes.

        An idle run that changes its band goes to the end of the new one, and those that it stands
        behind follow it there, even where they stood in it before (S19).
        """
        moved_band: int | None = None
        above: CachedRun | None = run
        while above is not None:
            claims = _claims_of(above)
            before = claims.band
            band = self.band_of(claims)
            if band == before and (band is None or band != moved_band):
                return
            claims.band = band
            if above.is_linked:
                self._move(above)
                moved_band = above.band
            above = _lane_above(above)
            if above is not None and band != before:
                _claims_of(above).recount(before, band)

    def _move(self, run: CachedRun) -> None:
        is_withheld = run.withheld
        self._order.remove(run)
        self.place(run)
        self._order.append(run)
        if is_withheld:
            self._order.withhold(run)


def _claims_of(run: CachedRun) -> RunClaims:
    if run.claims is None:
        run.claims = RunClaims()
    return run.claims


def _lane_above(run: CachedRun) -> Lane | None:
    """Return the lane behind which a lane stands; a window block stands alone."""
    if not isinstance(run, Lane):
        return None
    parent = run.node.parent
    return parent.lane if isinstance(parent, Node) else None
