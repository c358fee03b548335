"""A policy that heeds retention hints, and is least recently used where there are none.

The order in which blocks are given up:

1. blocks of conversations that are over, if no other sequence has parted from them: a prefix that
   several prompts share is nobody's tail and counts as without a hint;
2. for each priority from 0 up: blocks without a hint, then those of conversations whose next turn
   is expected. No hint is priority 0.

Within each of these the least recently used go first. A shared prefix has the best claim of all
that are cached behind it. A continuation is answered by the next sequence that goes on behind the
blocks; a priority with a duration holds for that time whoever uses the blocks, one without until
then. A preempted sequence is expected back whatever its client said.
"""

from typing import ClassVar

from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.limits import RETENTION_PRIORITY_MAX
from prefixd.controller.core.messages import CloseReason
from prefixd.controller.core.policies.policy import Claim

EXPECTED_MS_DEFAULT = 1_800_000
"""How long a turn is expected where the hint names no duration: conversations are left silently,
and their blocks must not outlive those of living ones for ever. In a public trace of conversations
99 in 100 turns came within 27 minutes."""
OVER = Claim(band=0)


class Retention:
    """Bands: conversations that are over, then two for each priority."""

    band_count: ClassVar[int] = 1 + 2 * (RETENTION_PRIORITY_MAX + 1)
    unclaimed_band: ClassVar[int] = 1

    def claim(self, hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> Claim:
        """Claim what the hint asks for."""
        continuation = hint.continuation
        if reason is CloseReason.PREEMPTED:
            continuation = Continuation.EXPECTED
        if continuation is Continuation.OVER:
            return OVER
        is_expected = continuation is Continuation.EXPECTED
        band = 1 + 2 * hint.priority
        duration_ms = hint.duration_ms or (EXPECTED_MS_DEFAULT if is_expected else 0)
        return Claim(
            band=band + is_expected,
            until_ms=now_ms + duration_ms if duration_ms else None,
            band_once_used=band if hint.priority and hint.duration_ms else None,
        )
