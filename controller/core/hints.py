"""What a driver may say about later use of a sequence's blocks (rule S20)."""

from dataclasses import dataclass
from enum import Enum


class Continuation(Enum):
    """Whether a conversation goes on behind a sequence."""

    UNKNOWN = "unknown"
    EXPECTED = "expected"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RetentionHint:
    """A driver's hint; what it means is the eviction policy's to decide.

    `priority` is 0 to RETENTION_PRIORITY_MAX; `duration_ms` counts from the close on, 0: no end.
    """

    continuation: Continuation = Continuation.UNKNOWN
    priority: int = 0
    duration_ms: int = 0


NO_HINT = RetentionHint()
"""What a driver says that says nothing."""
