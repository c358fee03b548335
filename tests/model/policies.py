"""Eviction policies of the naive pool (S20): claims by place, and where a block goes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import ge
from typing import TypeVar

from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import BlockId, CloseReason, Handle, PoolSpec
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from tests.model.control import NaiveControl
from tests.model.naive import Matched
from tests.model.sequence import NaiveSequence, Place

Where = TypeVar("Where")


@dataclass
class NaiveClaim:
    """What a closed sequence claims for the place where it ended: a band, until when, and the band
    that is left once another sequence goes on from there."""

    band: int
    until: float = inf
    left: int | None = None
    serial: int = 0

    def strength(self) -> tuple[float, ...]:
        """What claims at one place are compared by."""
        return (self.band, self.until, -1 if self.left is None else self.left, -self.serial)

    def outdoes(self, other: "NaiveClaim") -> bool:
        """Whether this claim is at no time the lower one."""
        return all(map(ge, self.strength()[:3], other.strength()[:3]))


def claim_by_hint(hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> NaiveClaim:
    """The policy `retention`: what is over goes first, then priority by priority what has no hint
    and what is expected back; an expectation ends after half an hour."""
    over = hint.continuation is Continuation.OVER
    expected = hint.continuation is Continuation.EXPECTED
    if reason is CloseReason.PREEMPTED:
        over, expected = False, True
    if over:
        return NaiveClaim(0)
    without = [1, 3, 5, 7, 9, 11, 13, 15][hint.priority]
    if hint.duration_ms:
        until: float = now_ms + hint.duration_ms
    else:
        until = now_ms + 30 * 60 * 1_000 if expected else inf
    pinned = hint.priority > 0 and hint.duration_ms > 0
    return NaiveClaim(without + expected, until, without if pinned else None)


def claims_of(policy_name: str) -> Callable[..., NaiveClaim]:
    """Gives a policy's own words; those of a policy that only a test has are taken as they are."""
    if policy_name == "retention":
        return claim_by_hint
    policy = EVICTION_POLICIES[policy_name]()

    def claim(hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> NaiveClaim:
        said = policy.claim(hint, reason=reason, now_ms=now_ms)
        until = inf if said.until_ms is None else said.until_ms
        return NaiveClaim(said.band, until, said.band_once_used)

    return claim


class NaiveEviction(NaiveControl):
    """A naive pool with a policy.

    `claims` has the claim that stands at a place, `parted` the places behind which sequences have
    parted. `standing` says in which band an idle block was put; blocks of the front have none.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.now_ms = 0
        self.claims: dict[Place, NaiveClaim] = {}
        self.parted: set[Place] = set()
        self.standing: dict[BlockId, int] = {}
        self.has_bands = EVICTION_POLICIES[spec.eviction_policy].band_count > 1
        self.unclaimed = EVICTION_POLICIES[spec.eviction_policy].unclaimed_band
        self._claim_of = claims_of(spec.eviction_policy)
        self._serial = 0

    def band(self, place: Place) -> int | None:
        """Returns the highest band claimed at a place or behind it; None where nothing is."""
        depth = len(place)
        bands = [claim.band for other, claim in self.claims.items() if other[:depth] == place]
        if bands and any(other[:depth] == place for other in self.parted):
            bands.append(self.unclaimed)
        return max(bands, default=None)

    def rest(self, block: BlockId) -> None:
        """Puts a block that became idle, or was refreshed, at the end of its band."""
        if not self.has_bands:
            super().rest(block)
            return
        if block in self.free:
            self.free.remove(block)
        place = self.place_of_block(block)
        assert place is not None
        band = self.band(place)
        if band is None:
            band = self.unclaimed
            self._stand(place, NaiveClaim(band))
            self._reckon(place)
        self.put(block, band)

    def put(self, block: BlockId, band: int) -> None:
        """Puts a block at the end of a band."""
        if block in self.free:
            self.free.remove(block)
        at = sum(self.standing.get(other, -1) <= band for other in self.free)
        self.free.insert(at, block)
        self.standing[block] = band

    def close(self, sequence: NaiveSequence, hint: RetentionHint, reason: CloseReason) -> None:
        """Lets a sequence that is about to be released claim the place where it ended."""
        if sequence.shared_count and self.has_bands:
            place = sequence.place(sequence.shared_count - 1)
            self._stand(place, self.claim(hint, reason))
            self._reckon(place)
            self._forget_outdone(place)

    def claim(self, hint: RetentionHint, reason: CloseReason) -> NaiveClaim:
        """Returns what the policy lets a sequence claim that is closed now."""
        return self._claim_of(hint, reason=reason, now_ms=self.now_ms)

    def use(self, matched: Matched) -> None:
        """Takes matched blocks out of the free order; a sequence goes on behind them."""
        for blocks in matched:
            for block in blocks.values():
                if block in self.free:
                    self.free.remove(block)
                    self.standing.pop(block, None)
        for blocks in matched if self.has_bands else ():
            place = self.place_of_block(blocks[0])
            assert place is not None
            self.answer(self.claims, place)
            self._reckon(place)

    def answer(self, claims: dict[Where, NaiveClaim], where: Where) -> None:
        """Lets a claim, if there is one, become what is left of it."""
        claim = claims.get(where)
        if claim is not None and claim.left is None:
            del claims[where]
        elif claim is not None and claim.left is not None:
            claim.band = claim.left

    def standing_claims(self) -> list[tuple[NaiveClaim, Callable[[], None]]]:
        """Returns all claims, each with what is to be done once it has changed."""
        return [(claim, partial(self._reckon, place)) for place, claim in self.claims.items()]

    def lapse(self) -> None:
        """Ends the claims whose time is over."""
        ending = sorted(self.standing_claims(), key=lambda one: (one[0].until, one[0].serial))
        for claim, reckon in ending:
            if claim.until <= self.now_ms:
                claim.until, claim.left = inf, None
                claim.band = min(claim.band, self.unclaimed)
                reckon()

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks from the front of the free order."""
        taken = super().take(count)
        for block in taken:
            self.standing.pop(block, None)
        return taken

    def drop(self, place: Place) -> None:
        """Takes a place out of the index."""
        super().drop(place)
        self.leave(place)

    def leave(self, place: Place) -> None:
        """Lets what is claimed at a place stand at the one before it, for the place is given up."""
        above = place[:-1]
        claim = self.claims.pop(place, None)
        if claim is not None and above:
            self._stand_again(above, claim)
        if place in self.parted:
            self.parted.discard(place)
            if above:
                self.parted.add(above)

    def _enter(self, place: Place, own: BlockId) -> None:
        above = place[:-1]
        other = self.index.get(place)
        if not self.has_bands:
            super()._enter(place, own)
            return
        has_sibling = other is None and any(
            len(one) == len(place) and one[:-1] == above for one in self.index
        )
        super()._enter(place, own)
        if other is not None and self.index[place] != other and other in self.free:
            self.standing.pop(other, None)
        if has_sibling and above and above not in self.parted:
            self.parted.add(above)
            self._reckon(above)

    def cut_tables(self) -> dict[Handle, int]:
        """Takes back what the unexecuted steps scheduled."""
        pending = [place for place, block in self.index.items() if not self.is_written(block)]
        for place in sorted(pending, key=len, reverse=True) if self.has_bands else ():
            self.leave(place)
        for block in self.pending():
            self.standing.pop(block, None)
        return super().cut_tables()

    def flush(self) -> int:
        """Empties the index."""
        dropped = super().flush()
        self._forget_claims()
        return dropped

    def set_model_version(self, model_version: str) -> int:
        """Drops the idle blocks of other versions."""
        if model_version != self.model_version:
            self._forget_claims()
        return super().set_model_version(model_version)

    def _forget_claims(self) -> None:
        self.claims.clear()
        self.parted.clear()

    def _stand(self, place: Place, claim: NaiveClaim) -> None:
        self.number(claim)
        self._stand_again(place, claim)

    def number(self, claim: NaiveClaim) -> None:
        """Says that a claim is the youngest."""
        self._serial += 1
        claim.serial = self._serial

    def _forget_outdone(self, place: Place) -> None:
        """Takes back what is claimed before a place and is at no time the higher claim. No band is
        another one by it; claims that end at one time then move the blocks of a path together."""
        claim = self.claims[place]
        for depth in range(1, len(place)):
            other = self.claims.get(place[:depth])
            if other is not None and claim.outdoes(other):
                del self.claims[place[:depth]]

    def _stand_again(self, place: Place, claim: NaiveClaim) -> None:
        other = self.claims.get(place, claim)
        self.claims[place] = max(other, claim, key=NaiveClaim.strength)

    def _reckon(self, place: Place) -> None:
        """Moves the idle blocks from a place up whose band is another one now; those in front of
        one that was moved stay behind it in the free order (S19)."""
        moved_band: int | None = None
        for depth in range(len(place), 0, -1):
            block = self.index.get(place[:depth])
            band = self.band(place[:depth])
            if block not in self.free or band is None:
                continue
            if self.standing[block] != band or band == moved_band:
                self.rest(block)
                moved_band = band
