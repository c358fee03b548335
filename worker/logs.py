"""Structured logs: one JSON object per line on standard error. Never token ids, never text."""

import logging
import sys
from typing import Protocol, Self, TextIO

LOG_LEVELS = ("debug", "info", "warning", "error")
"""Levels by name, from the most to the least talkative."""


class Log(Protocol):
    """What the worker needs of a logger: events with keys."""

    def bind(self, **keys: object) -> Self:
        """A logger that adds these keys to each event."""
        ...

    def debug(self, event: str, **keys: object) -> None:
        """Details of single calls and steps."""
        ...

    def info(self, event: str, **keys: object) -> None:
        """Changes in the life of the process, its pool or its session."""
        ...

    def warning(self, event: str, **keys: object) -> None:
        """Trouble that passes by itself."""
        ...

    def error(self, event: str, **keys: object) -> None:
        """Trouble that cost somebody an answer."""
        ...


def json_logger(level: str, stream: TextIO = sys.stderr) -> Log:
    """Makes a logger that writes JSON lines of at least `level`; it configures nothing global."""
    # Imported here, so that the engine can be used where structlog is not installed.
    import structlog

    logger: Log = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
    )
    return logger
