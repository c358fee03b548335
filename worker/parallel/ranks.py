"""The processes of ranks 1 and above, as rank 0 sees them."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent import futures
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from types import TracebackType
from typing import NoReturn, Self

from prefixd.worker.errors import WorkerBroken
from prefixd.worker.parallel.messages import Answer, Failed, decode_answer

MODULE = "prefixd.worker.parallel"
END_TIMEOUT_S = 5.0
"""How long ranks have for ending by themselves once they are let go."""
NOTICE_TIMEOUT_S = 1.0
"""How soon a rank that broke a pass is known to be lost."""

_STDERR = 2


class RankLost(WorkerBroken):
    """A rank ended or failed, so the model is not whole any more."""


class RankEnded(RankLost):
    """A rank's process ended without a word: it was killed, or it crashed."""


class Ranks:
    """One process per rank above 0, and a pipe each way.

    A pipe's end is how either side learns that the other one has ended, however it ended. One
    thread receives from all ranks, so that a loss is noticed while nothing is asked, too.

    Invariants: a lost rank is never replaced; once one is lost, whatever is asked raises; after
    `close` none of the processes lives.
    """

    def __init__(self, rank_count: int) -> None:
        """Starts ranks 1 to ``rank_count`` - 1; each waits for what it is told first."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._commands: list[Connection] = []
        self._answers: dict[Connection, SimpleQueue[Answer]] = {}
        self._lost: futures.Future[NoReturn] = futures.Future()
        self._lock = threading.Lock()
        self._is_closing = False
        for rank in range(1, rank_count):
            self._start(rank)
        self._receiver = threading.Thread(target=self._receive, name="ranks", daemon=True)
        self._receiver.start()

    def __enter__(self) -> Self:
        """Nothing: they run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends them."""
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of ranks 1 and above."""
        return tuple(process.pid for process in self._processes)

    def tell(self, frames: Sequence[bytes]) -> None:
        """Sends each rank its own frame.

        Raises:
            RankLost: one is gone.
        """
        for rank, (commands, frame) in enumerate(zip(self._commands, frames, strict=True), start=1):
            try:
                commands.send_bytes(frame)
            except OSError:
                self._lose(rank)
        self.check()

    def tell_all(self, frame: bytes) -> None:
        """Sends every rank the same frame.

        Raises:
            RankLost: one is gone.
        """
        self.tell([frame] * len(self._processes))

    def answers(self) -> list[Answer]:
        """Waits for the next answer of each rank.

        Raises:
            RankLost: one is gone, or failed.
        """
        self.check()
        answers = [queue.get() for queue in self._answers.values()]
        self.check()
        return answers

    def check(self) -> None:
        """Raises RankLost if a rank is gone or has failed; rank 0 counts too."""
        if self._lost.done():
            self._lost.result()

    def check_ends(self, error: Exception) -> None:
        """Rank 0 met an error that may come of a rank's end.

        Raises:
            RankEnded: it does.
        """
        futures.wait([self._lost], NOTICE_TIMEOUT_S)
        if self._lost.done() and isinstance(self._lost.exception(), RankEnded):
            self.give_up(error)

    def give_up(self, error: Exception) -> NoReturn:
        """Rank 0 could not do its part, whoever is to blame.

        Raises:
            RankLost: always, from the error; it names the rank that is lost, if one is.
        """
        futures.wait([self._lost], NOTICE_TIMEOUT_S)
        self._fail(RankLost, f"rank 0 failed: {error}")
        try:
            self._lost.result()
        except RankLost as lost:
            raise lost from error

    async def watch(self) -> NoReturn:
        """Waits until a rank is lost.

        Raises:
            RankLost: it is.
        """
        await asyncio.shield(asyncio.wrap_future(self._lost))

    def close(self, *, timeout_s: float = END_TIMEOUT_S) -> None:
        """Lets the ranks go, and kills those that have not gone in time; again is harmless."""
        self._is_closing = True
        for commands in self._commands:
            commands.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._receiver.join()

    def _start(self, rank: int) -> None:
        their_commands, commands = Pipe(duplex=False)
        answers, their_answers = Pipe(duplex=False)
        theirs = (their_commands.fileno(), their_answers.fileno())
        with their_commands, their_answers:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(rank), *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                # Standard output is rank 0's: it carries one line.
                stdout=_STDERR,
                pass_fds=theirs,
                # Ctrl-C is for rank 0: a rank that has just started could not ignore it yet.
                process_group=0,
            )
        self._processes.append(process)
        self._commands.append(commands)
        self._answers[answers] = SimpleQueue()

    def _receive(self) -> None:
        ranks = {answers: rank for rank, answers in enumerate(self._answers, start=1)}
        while ranks:
            for answers in wait(list(ranks)):
                assert isinstance(answers, Connection)
                rank = ranks[answers]
                try:
                    answer = decode_answer(answers.recv_bytes())
                except (EOFError, OSError):
                    del ranks[answers]
                    answers.close()
                    self._lose(rank)
                    continue
                if isinstance(answer, Failed):
                    self._fail(RankLost, f"rank {rank} failed: {answer.reason}")
                else:
                    self._answers[answers].put(answer)

    def _lose(self, rank: int) -> None:
        if self._is_closing:
            return
        try:
            status = f"ended with status {self._processes[rank - 1].wait(END_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            status = "answers no more"
        self._fail(RankEnded, f"rank {rank} {status}")

    def _fail(self, kind: type[RankLost], reason: str) -> None:
        """The first reason stands; whoever waits for an answer learns that none will come."""
        with self._lock:
            if self._lost.done():
                return
            rank_count = len(self._processes) + 1
            self._lost.set_exception(kind(f"{reason}; the model needs all {rank_count} ranks"))
        for queue in self._answers.values():
            queue.put(Failed(reason))
