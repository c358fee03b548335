"""Ends and failures of the processes of a split worker; each test starts one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from prefixd.v1 import inspect_pb2
from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs
from tests.support.worker import (
    Client,
    WorkerProcess,
    client,
    error_reason,
    tokens_request,
    wait_until,
    worker_process,
)
from tests.worker.parallel.conftest import options

pytestmark = pytest.mark.slow  # each starts two processes that import torch


RUN_FIRST = """
import builtins
import os
import signal
import sys

importing = builtins.__import__


def import_and_break(name, *arguments, **options):
    module = importing(name, *arguments, **options)
    follower = sys.modules.get("prefixd.worker.parallel.follower")
    if hasattr(follower, "follow"):
        builtins.__import__ = importing
        break_rank(follower)
    return module


if "prefixd.worker.parallel" in sys.orig_argv:
    builtins.__import__ = import_and_break
"""
"""What Python runs first in every process: it lets `break_rank` change a rank above 0."""

FAIL_IN_THIRD_PASS = """
def break_rank(follower):
    decode, works = follower.decode_work, []

    def decode_work(frame):
        works.append(decode(frame))
        if len(works) == 3:
            raise MemoryError("no room")
        return works[-1]

    follower.decode_work = decode_work
"""

DIE_WHILE_LOADING = """
def break_rank(follower):
    loading = sys.modules["prefixd.worker.parallel.loading"]
    loading.load_split = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""


def broken_rank(folder: Path, break_rank: str) -> dict[str, str]:
    """An environment in which the ranks above 0 break."""
    (folder / "sitecustomize.py").write_text(RUN_FIRST + break_rank)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@dataclass(frozen=True)
class Split:
    """A split worker, its processes, and how to ask it."""

    worker: WorkerProcess
    ranks: list[psutil.Process]
    calls: Client
    control: Stubs

    def begin_long_answer(self) -> Any:
        """Starts an answer that takes seconds, and waits for its first tokens."""
        answer = self.calls.worker.Generate(
            tokens_request([3, 4, 5], token_count_max=1_900, ignore_end_of_sequence=True),
            timeout=60,
        )
        for _ in range(3):
            next(answer)
        return answer

    def wait_gone(self) -> None:
        """Waits until none of the other ranks' processes lives."""
        wait_until(lambda: not any(rank.is_running() for rank in self.ranks))

    @property
    def pool_names(self) -> list[str]:
        """Pools that the controller knows."""
        request = inspect_pb2.ListPoolsRequest()
        return [pool.pool_name for pool in self.control.inspect.ListPools(request).pools]

    @property
    def last_words(self) -> list[str]:
        """What it said beside its log."""
        return [line.strip() for line in self.worker.log if not line.startswith("{")]


@pytest.fixture
def controller() -> Iterator[ControllerThread]:
    """An in-process controller."""
    with controller_thread() as running:
        yield running


@contextmanager
def running(
    folder: Path, controller: ControllerThread, environment: dict[str, str] | None = None
) -> Iterator[Split]:
    """A split worker, ready."""
    its_options = options(folder, controller.address)
    with (
        worker_process(*its_options, environment=environment) as worker,
        client(worker.address) as calls,
        stubs(controller.address) as control,
    ):
        calls.wait_serving()
        ranks = psutil.Process(worker.process.pid).children()
        assert len(ranks) == 1
        yield Split(worker, ranks, calls, control)


def test_a_killed_rank_ends_the_worker(four_heads: Path, controller: ControllerThread) -> None:
    """In the middle of an answer: one line says which, and the pool is given back."""
    with running(four_heads, controller) as split:
        answer = split.begin_long_answer()
        split.ranks[0].kill()

        with pytest.raises(grpc.RpcError) as caught:
            list(answer)
        assert error_reason(caught.value) in {"DRAINING", "INTERNAL_FAILURE"}
        assert split.worker.wait_ended() == 1
        assert split.last_words == [
            "prefixd worker: rank 1 ended with status -9; the model needs all 2 ranks"
        ]
        assert split.pool_names == []


def test_an_idle_worker_notices_a_killed_rank(
    four_heads: Path, controller: ControllerThread
) -> None:
    """Nothing has to be asked of it."""
    with running(four_heads, controller) as split:
        split.ranks[0].kill()

        assert split.worker.wait_ended() == 1
        assert "rank 1 ended with status -9" in split.last_words[-1]


def test_a_rank_that_fails_in_a_pass_ends_the_worker(
    four_heads: Path, controller: ControllerThread, tmp_path: Path
) -> None:
    """The others wait for its part then; they do not hang, and its error is told."""
    environment = broken_rank(tmp_path, FAIL_IN_THIRD_PASS)
    with running(four_heads, controller, environment) as split:
        with pytest.raises(grpc.RpcError):
            split.calls.generate(tokens_request([3, 4, 5], token_count_max=100))

        assert split.worker.wait_ended() == 1
        assert split.last_words == [
            "prefixd worker: rank 1 failed: MemoryError: no room; the model needs all 2 ranks"
        ]
        split.wait_gone()


def test_a_rank_that_dies_while_it_loads_ends_the_worker(
    four_heads: Path, controller: ControllerThread, tmp_path: Path
) -> None:
    """The model is not to blame, though its collectives fail."""
    worker = WorkerProcess(
        *("--listen", "127.0.0.1:0", *options(four_heads, controller.address)),
        environment=broken_rank(tmp_path, DIE_WHILE_LOADING),
    )
    try:
        assert worker.wait_ended() == 1
        (words,) = [line.strip() for line in worker.log if not line.startswith("{")]
        assert words == "prefixd worker: rank 1 ended with status -9; the model needs all 2 ranks"
    finally:
        worker.close()


def terminate(split: Split) -> None:
    """Tells rank 0 to end."""
    split.worker.process.terminate()


def interrupt_all(split: Split) -> None:
    """Does what Ctrl-C does: every process of the terminal gets the signal."""
    for rank in split.ranks:
        rank.send_signal(signal.SIGINT)
    split.worker.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("end", [terminate, interrupt_all])
def test_told_to_end_no_process_is_left(
    four_heads: Path, controller: ControllerThread, end: Callable[[Split], None]
) -> None:
    """In the middle of an answer, which ends as DRAINING."""
    with running(four_heads, controller) as split:
        answer = split.begin_long_answer()
        end(split)

        with pytest.raises(grpc.RpcError) as caught:
            list(answer)
        assert error_reason(caught.value) == "DRAINING"
        assert split.worker.wait_ended() == 0
        assert split.last_words == []
        assert not any(rank.is_running() for rank in split.ranks)
        assert split.pool_names == []


def test_no_process_outlives_a_killed_worker(
    four_heads: Path, controller: ControllerThread
) -> None:
    """Nobody could tell it to end."""
    with running(four_heads, controller) as split:
        split.begin_long_answer()
        split.worker.process.kill()

        split.wait_gone()


def test_told_to_end_while_it_loads_no_process_is_left(
    four_heads: Path, controller: ControllerThread
) -> None:
    """Ranks may be importing, meeting or reading weights then."""
    worker = WorkerProcess("--listen", "127.0.0.1:0", *options(four_heads, controller.address))
    try:
        rank_0 = psutil.Process(worker.process.pid)
        wait_until(lambda: len(rank_0.children()) == 1)
        ranks = rank_0.children()
        os.kill(worker.process.pid, signal.SIGTERM)

        assert worker.wait_ended() == 0
        wait_until(lambda: not any(rank.is_running() for rank in ranks))
    finally:
        worker.close()
