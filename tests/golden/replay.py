"""Replays recorded traces on a real controller over gRPC: `python -m tests.golden.replay FILE`.

Prints one line and exits with 0 where all are equal, 1 at the first difference, 2 for a bad file.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from prefixd.controller.config import Config
from tests.golden.grpc_subject import GrpcSubject
from tests.golden.player import Difference, Player
from tests.golden.subjects import spec_of
from tests.golden.traces import FormatError, Trace, load_traces
from tests.support.controller import ANY_PORT, controller_thread, stubs


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was replayed."""

    trace_count: int
    operation_count: int

    def __str__(self) -> str:
        return f"{self.trace_count} traces, {self.operation_count} operations: all equal"


def hashing_of(numbered: tuple[int, Trace]) -> tuple[str, str]:
    """Returns the hash algorithm and the seed of a trace: each pair needs its own controller."""
    _, trace = numbered
    return trace.hash_algorithm, trace.hash_seed


def replay_file(path: Path) -> Counts:
    """Replays every trace of a file. Raises Difference or FormatError."""
    traces = load_traces(path)
    numbered = sorted(enumerate(traces), key=hashing_of)
    for (algorithm, seed), group in groupby(numbered, key=hashing_of):
        config = Config(listen=ANY_PORT, hash_algorithm=algorithm, hash_seed=seed)
        with controller_thread(config) as controller, stubs(controller.address) as connected:
            for index, trace in group:
                spec = spec_of(trace, pool_name=f"trace-{index}")
                with closing(GrpcSubject(connected, spec)) as subject:
                    _play(index, trace, subject)
    return Counts(len(traces), sum(len(trace.operations) for trace in traces))


def _play(index: int, trace: Trace, subject: GrpcSubject) -> None:
    try:
        Player(subject).play(trace)
    except Difference as difference:
        raise Difference(f"trace {index}, {difference}") from difference


def main(arguments: Sequence[str]) -> int:
    """Replays the file that the only argument names; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m tests.golden.replay FILE", file=sys.stderr)
        return 2
    try:
        print(replay_file(Path(arguments[0])))
    except Difference as difference:
        print(difference)
        return 1
    except FormatError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
