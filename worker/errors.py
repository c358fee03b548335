"""The worker's errors towards its clients, and its own end.

`reason` is the name of a value of `prefixd.v1.ErrorReason` without its prefix; `numbers` holds
every number of the message by name; `field` is the path of the offending field, where there is one.
"""

from collections.abc import Mapping


class WorkerError(Exception):
    """A request or an answer was given up; nothing of it is left behind."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        numbers: Mapping[str, int | float] | None = None,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.numbers = dict(numbers or {})
        self.field = field


class WorkerBroken(Exception):
    """A part of the worker ended by itself, so the process must."""


def field_invalid(
    field: str, message: str, *, numbers: Mapping[str, int | float] | None = None
) -> WorkerError:
    """A field of a request is out of its range, malformed, or contradicts another."""
    return WorkerError("FIELD_INVALID", message, numbers=numbers, field=field)


def controller_unavailable(message: str) -> WorkerError:
    """The worker has no controller at the moment."""
    return WorkerError("CONTROLLER_UNAVAILABLE", message)


def draining() -> WorkerError:
    """The worker is about to stop."""
    return WorkerError("DRAINING", "the worker is stopping; it takes no more work")


def internal_failure(message: str) -> WorkerError:
    """The worker failed; its log holds the cause."""
    return WorkerError("INTERNAL_FAILURE", message)
