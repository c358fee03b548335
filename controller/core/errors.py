"""The core's errors: one class per reason of the protocol.

`reason` is the name of a value of `prefixd.v1.ErrorReason` without its prefix. `numbers` holds
every number of the message by name; `field` is the path of the offending field, where there is one.
"""

from collections.abc import Mapping
from typing import ClassVar


class CacheError(Exception):
    """Base of all errors of the core. Whoever raises one has changed nothing."""

    reason: ClassVar[str]

    def __init__(
        self, message: str, *, numbers: Mapping[str, int] | None = None, field: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.numbers = dict(numbers or {})
        self.field = field


class FieldInvalid(CacheError):
    """A field is out of its range, malformed, or contradicts another."""

    reason = "FIELD_INVALID"


class TokenIdInvalid(CacheError):
    """A token id is not below the pool's vocabulary size."""

    reason = "TOKEN_ID_INVALID"


class PromptEmpty(CacheError):
    """A prompt holds no token."""

    reason = "PROMPT_EMPTY"


class Unsupported(CacheError):
    """The message asks for something that this controller does not offer."""

    reason = "UNSUPPORTED"


class PageTokenInvalid(CacheError):
    """The page token was not made by this listing, or its pool changed epoch."""

    reason = "PAGE_TOKEN_INVALID"


class PoolNotFound(CacheError):
    """No pool has this name."""

    reason = "POOL_NOT_FOUND"


class SequenceNotFound(CacheError):
    """The pool has no such sequence."""

    reason = "SEQUENCE_NOT_FOUND"


class BlockNotFound(CacheError):
    """The pool has no such block."""

    reason = "BLOCK_NOT_FOUND"


class PoolInUse(CacheError):
    """The name belongs to a pool whose session is open."""

    reason = "POOL_IN_USE"


class SequenceExists(CacheError):
    """The sequence id or its handle belongs to an open sequence."""

    reason = "SEQUENCE_EXISTS"


class NotPoolDriver(CacheError):
    """The session token is not the one the pool's driver was given."""

    reason = "NOT_POOL_DRIVER"


class SessionActive(CacheError):
    """The pool's session stream is open."""

    reason = "SESSION_ACTIVE"


class BlocksInUse(CacheError):
    """Blocks are held, or steps unconfirmed, so the pool cannot be flushed."""

    reason = "BLOCKS_IN_USE"


class SequenceExceedsPool(CacheError):
    """The blocks that one entry needs exceed the whole pool (needed_count, available_count)."""

    reason = "SEQUENCE_EXCEEDS_POOL"


class EpochStale(CacheError):
    """The epoch has ended."""

    reason = "EPOCH_STALE"


class StepOutOfOrder(CacheError):
    """The step id is neither known nor the next one."""

    reason = "STEP_OUT_OF_ORDER"


class PositionMismatch(CacheError):
    """A position differs from the controller's."""

    reason = "POSITION_MISMATCH"


class PoolExhausted(CacheError):
    """Too few blocks are free or evictable now (needed_count, available_count).

    The needed ones are the new blocks and the idle matched ones, which are free no longer then.
    """

    reason = "POOL_EXHAUSTED"


class StepsInFlight(CacheError):
    """Too many steps are unconfirmed."""

    reason = "STEPS_IN_FLIGHT"


class TokenBudgetSpent(CacheError):
    """The step's token budget is used up."""

    reason = "TOKEN_BUDGET"


class CopyInSameStep(CacheError):
    """A block must be copied whose tokens are scheduled, or copied themselves, in this step."""

    reason = "COPY_IN_SAME_STEP"


class LimitExceeded(CacheError):
    """A documented limit is reached."""

    reason = "LIMIT_EXCEEDED"


class EventsCompacted(CacheError):
    """The requested events are no longer kept; the watcher lists again."""

    reason = "EVENTS_COMPACTED"


class Draining(CacheError):
    """The server or the pool is draining."""

    reason = "DRAINING"


class InvariantBroken(CacheError):
    """An invariant of the pool broke; its epoch ends."""

    reason = "INVARIANT_BROKEN"


def require(condition: bool, message: str) -> None:
    """Raise InvariantBroken with the message unless an invariant holds."""
    if not condition:
        raise InvariantBroken(message)
