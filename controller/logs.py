"""Structured logs: one JSON object per line on standard error."""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import FilteringBoundLogger

LOG_LEVELS = ("debug", "info", "warning", "error")
"""Levels by name, from the most to the least talkative."""


def json_logger(level: str, stream: TextIO = sys.stderr) -> FilteringBoundLogger:
    """Makes a logger that writes JSON lines of at least `level`; it configures nothing global."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
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
