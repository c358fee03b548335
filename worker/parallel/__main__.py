"""`python -m prefixd.worker.parallel RANK COMMANDS ANSWERS`: one rank above 0, for rank 0 alone.

COMMANDS and ANSWERS are the file descriptors of the pipes that lead here from rank 0 and back; RANK
is for people who look at a list of processes. The process ends when rank 0 closes the first pipe or
ends, whatever it is doing then.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue


def main() -> None:
    """Serves rank 0 until it lets go."""
    # Rank 0 ends this process, also where a signal goes to all processes of a terminal or service.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _rank, commands_descriptor, answers_descriptor = map(int, sys.argv[1:])
    commands = Connection(commands_descriptor, writable=False)
    answers = Connection(answers_descriptor, readable=False)
    frames: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(commands, frames), daemon=True).start()
    # Imported here: torch takes seconds, in which the end of rank 0 is to be noticed, too.
    from prefixd.worker.parallel.follower import follow

    follow(frames.get, answers.send_bytes)


def _receive(commands: Connection, frames: "SimpleQueue[bytes]") -> None:
    while True:
        try:
            frames.put(commands.recv_bytes())
        except (EOFError, OSError):
            # Whatever this rank is doing, there is nobody left to do it for.
            os._exit(0)


if __name__ == "__main__":
    main()
