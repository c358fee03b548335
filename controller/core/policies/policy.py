"""What an eviction policy is asked, and what it answers (rule S20).

The free order is cut into bands, and the blocks of lower bands are handed out first. When a
sequence is closed its policy says which band it claims for its blocks, and that is all that a
policy decides. Within a band the least recently used run goes first. Whatever a policy answers, a
run stands no lower than what is cached behind it, so S13, S17 to S19, S21 and S22 hold under every
policy (`claims`).
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.messages import CloseReason


@dataclass(frozen=True, slots=True)
class Claim:
    """How strongly a closed sequence asks for its blocks to stay.

    It stands until the next sequence that goes on behind the blocks is opened, of which
    `band_once_used` says what is left (None: nothing), or until `until_ms` (None: no end): then it
    falls to the policy's `unclaimed_band`, unless it is below that.
    """

    band: int
    until_ms: int | None = None
    band_once_used: int | None = None


class EvictionPolicy(Protocol):
    """Says how strongly a closed sequence claims its blocks.

    Bands are numbered 0 to `band_count` - 1. `unclaimed_band` is that of blocks of which no closed
    sequence says anything, and the least for a prefix behind which sequences have parted.
    """

    band_count: ClassVar[int]
    unclaimed_band: ClassVar[int]

    def claim(self, hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> Claim:
        """Return the claim of a sequence that is closed at `now_ms`, for its whole table."""
        ...
