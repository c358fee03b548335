"""The default policy: what was used last is kept longest; hints are not heeded."""

from typing import ClassVar

from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.messages import CloseReason
from prefixd.controller.core.policies.policy import Claim

CLAIM = Claim(band=0)


class LeastRecentlyUsed:
    """One band for all blocks: vLLM's order."""

    band_count: ClassVar[int] = 1
    unclaimed_band: ClassVar[int] = 0

    def claim(self, hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> Claim:
        """Claim nothing in particular."""
        return CLAIM
