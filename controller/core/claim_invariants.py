"""The invariants of claims and bands (S20), as code."""

from collections import Counter

from prefixd.controller.core.errors import require
from prefixd.controller.core.free_order import CachedRun
from prefixd.controller.core.node import Lane, Node
from prefixd.controller.core.state import PoolState
from prefixd.controller.core.window_blocks import WindowBlock


def check(state: PoolState, nodes: list[Node]) -> None:
    """Check that every run has the band that follows from the claims, and that no claim is kept
    for a run that has it no more. Raises InvariantBroken."""
    for ending in state.claims.ending():
        run = ending.run
        require(
            isinstance(run, Lane | WindowBlock)
            and (run.is_linked or run.holder_count > 0)
            and run.claims is not None
            and run.claims.claim is ending,
            "a claim that stands nowhere is to end",
        )
    for segment, band in state.order.bands():
        if not isinstance(segment, CachedRun):
            continue
        require(segment.band == band, "an idle run stands in another band than its own")
        if state.claims.has_bands:
            require(
                segment.claims is not None and segment.claims.band == band,
                "an idle run stands in another band than is claimed",
            )
    for node in nodes:
        claims = node.lane.claims
        behind = Counter(
            child.lane.claims.band
            for child in node.children.values()
            if child.lane.claims is not None and child.lane.claims.band is not None
        )
        if claims is None:
            require(not behind, "claims behind a run are unknown to it")
            continue
        require(claims.bands_behind == behind, "the bands behind a run are counted wrong")
        require(
            claims.claim is None or claims.claim.run is node.lane,
            "a claim stands at another run than it says",
        )
        require(claims.band == state.claims.band_of(claims), "a run's band is not the highest")
