"""An eviction policy that answers whatever it likes: what holds under it holds under every one."""

from typing import ClassVar

from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.messages import CloseReason
from prefixd.controller.core.policies.policy import Claim


class Arbitrary:
    """Claims that follow from the time and the hint by no rule that makes sense."""

    band_count: ClassVar[int] = 4
    unclaimed_band: ClassVar[int] = 2

    def claim(self, hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> Claim:
        """Claims something."""
        drawn = 31 * now_ms // 10 + 7 * hint.priority + 3 * hint.duration_ms + len(reason.value)
        ends = drawn % 3 == 0
        return Claim(
            band=drawn % self.band_count,
            until_ms=now_ms + drawn % 70 if ends else None,
            band_once_used=drawn // 5 % self.band_count if drawn % 5 else None,
        )
