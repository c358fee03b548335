"""What a rank above 0 does: it loads its part of the model, then runs what rank 0 runs."""

from collections.abc import Callable
from typing import NoReturn

from prefixd.worker.config import ConfigInvalid
from prefixd.worker.logs import json_logger
from prefixd.worker.model.errors import ModelRefused, ModelUnavailable
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.model_setup import settle
from prefixd.worker.parallel.frames import decode_work
from prefixd.worker.parallel.group import find_store
from prefixd.worker.parallel.loading import load_part
from prefixd.worker.parallel.messages import (
    Assignment,
    Done,
    Failed,
    Fits,
    decode_assignment,
    decode_number,
    encode_answer,
)

REFUSALS = (ConfigInvalid, ModelRefused, ModelUnavailable)
"""Errors that rank 0 meets as well, and tells."""
LOG_LEVEL = "error"
"""Rank 0 tells the rest."""


def follow(receive: Callable[[], bytes], answer: Callable[[bytes], None]) -> NoReturn:
    """Runs passes as rank 0 tells them; rank 0 ends the process.

    A rank that could not do its part of a pass is of no more use: it tells why and ends, whereby
    the others notice that they wait for it in vain.

    Args:
        receive: waits for the next frame.
        answer: sends one.

    Raises:
        SystemExit: it failed, and rank 0 knows.
    """
    log = json_logger(LOG_LEVEL)
    rank = 0
    try:
        assignment = decode_assignment(receive())
        rank = assignment.rank
        runner = _load(assignment, receive, answer)
        answer(encode_answer(Done()))
        while True:
            work = decode_work(receive())
            if isinstance(work, tuple):
                runner.copy(work)
            else:
                runner.run(work)
            answer(encode_answer(Done()))
    except Exception as error:
        if not isinstance(error, REFUSALS):
            log.error("rank_failed", rank=rank, exc_info=error)
        answer(encode_answer(Failed(f"{type(error).__name__}: {error}")))
        raise SystemExit(1) from error


def _load(
    assignment: Assignment, receive: Callable[[], bytes], answer: Callable[[bytes], None]
) -> ModelRunner:
    """Loads this rank's part; all ranks have as many blocks as the one with the fewest can hold."""
    config = assignment.model
    setting = settle(config, report=_report_nothing)
    # Rank 0 meets this one in a moment; it would wait there for one that cannot come.
    answer(encode_answer(Done()))
    store = find_store(assignment.store_port, config.rank_count)
    part = load_part(config, setting, rank=assignment.rank, store=store)
    answer(encode_answer(Fits(part.fitting_pool().block_count)))
    return part.runner(block_count=decode_number(receive()), report=_report_nothing)


def _report_nothing(_line: str) -> None:
    """All ranks do the same, and rank 0 tells of it."""
