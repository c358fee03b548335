"""What a client knows about later use of an answer's blocks."""

from dataclasses import dataclass
from enum import Enum


class Continuation(Enum):
    """Whether a conversation goes on behind an answer."""

    UNKNOWN = "unknown"
    EXPECTED = "expected"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RetentionHint:
    """A client's hint, which the pool's eviction policy may heed.

    Attributes:
        continuation: whether another turn follows.
        priority: 0 to RETENTION_PRIORITY_MAX; higher stays longer.
        duration_ms: how long the hint holds from the answer's end on; 0: until it is used.
    """

    continuation: Continuation = Continuation.UNKNOWN
    priority: int = 0
    duration_ms: int = 0
