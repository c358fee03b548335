"""Controller and worker as child processes: started, found ready, watched and stopped together."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from prefixd.clients.connection import Connection
from prefixd.clients.controller_client import ControllerClient
from prefixd.clients.errors import PrefixdError, ServerUnreachable
from prefixd.clients.transport import SyncClient
from prefixd.clients.worker_client import WorkerClient

LOG_LINES_KEPT = 20
"""Lines of a child's log that are shown when it dies."""
STOP_S = 5.0
"""How long stopping may take in all; whoever has not ended by then is killed."""
STOP_RESERVE_S = 1.0
"""The controller's share of it: the worker goes first, to give its pool back."""
CONTROLLER_READY_S = 20.0
"""How long a controller may take to serve."""
WORKER_READY_S = 900.0
"""How long a worker may take to serve; its first start may fetch a model."""
MODEL_SETUP_EVENT = "model_setup"
"""Log event of a worker that brings a model up, with what it does or found as `step`."""
HEALTH_SLICE_S = 1.0
"""How often a wait for readiness looks whether the process still lives."""


class ProcessEnded(PrefixdError):
    """A child process ended by itself; `log_lines` are the last it wrote."""

    def __init__(self, name: str, *, exit_code: int, log_lines: Sequence[str]) -> None:
        how = f"exit code {exit_code}" if exit_code >= 0 else f"killed by {_signal(-exit_code)}"
        super().__init__(f"the {name} ended by itself ({how})")
        self.name = name
        self.exit_code = exit_code
        self.log_lines = tuple(log_lines)


class ProcessSlow(PrefixdError):
    """A child process was not ready in time."""


class ServerProcess:
    """One server in a process of its own, and the JSON log lines that it writes.

    `python -m MODULE ARGUMENTS` writes an event `NAME_started` with its `addresses` once it
    listens. `report` is told, from another thread, what takes long before that. The process has a
    session of its own, so a terminal's Ctrl-C reaches only its parent, which stops its children in
    order; a parent that is killed takes its children with it (`tether`).
    """

    def __init__(
        self,
        name: str,
        *,
        module: str,
        arguments: Sequence[str],
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self._report = report
        self._process = subprocess.Popen(
            [sys.executable, "-m", "prefixd.clients.tether", module, *arguments],
            # gRPC's own complaints would stand beside a server's one clear line.
            env={"GRPC_VERBOSITY": "NONE"} | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tether = self._process.stdin
        self._log_lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._addresses: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._output_ended = False
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name=f"{name}-log", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def address(self, *, timeout_s: float) -> str:
        """Waits for the first listen address; ProcessEnded or ProcessSlow where none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._addresses or self._output_ended, timeout_s)
            if self._addresses:
                return self._addresses[0]
        self.check_running()
        raise ProcessSlow(f"the {self.name} did not listen within {timeout_s:g} s")

    def wait_until_serving(self, client: SyncClient, *, timeout_s: float) -> None:
        """Waits until `client` finds the server healthy; ProcessEnded or ProcessSlow otherwise."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                client.wait_until_serving(timeout_s=HEALTH_SLICE_S)
            except ServerUnreachable:
                self.check_running()
            else:
                return
        raise ProcessSlow(f"the {self.name} was not ready within {timeout_s:g} s")

    def check_running(self) -> None:
        """Raises ProcessEnded where the process has ended."""
        if not self._output_ended:
            return
        exit_code = self._process.wait()
        raise ProcessEnded(self.name, exit_code=exit_code, log_lines=self._log_lines)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` from another thread when the process has ended."""

        def wait() -> None:
            self._reader.join()
            callback()

        threading.Thread(target=wait, name=f"{self.name}-end", daemon=True).start()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM; a process that has ended is left alone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop_by(self, deadline_s: float) -> None:
        """Sends SIGTERM and waits until `deadline_s` (time.monotonic), then kills."""
        self.ask_to_stop()
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._tether.close()
        self._reader.join(STOP_RESERVE_S)

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                event = _event(line)
                with self._changed:
                    self._log_lines.append(line.rstrip("\n"))
                    if event.get("event") == f"{self.name}_started":
                        self._addresses = tuple(event["addresses"])
                        self._changed.notify_all()
                if event.get("event") == MODEL_SETUP_EVENT:
                    self._report(str(event.get("step", "bringing the model up")))
        with self._changed:
            self._output_ended = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ServersConfig:
    """What to start. The addresses may have port 0; arguments go to the processes unchanged."""

    controller_listen: str = "127.0.0.1:0"
    worker_listen: str = "127.0.0.1:0"
    controller_arguments: tuple[str, ...] = ()
    worker_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Servers:
    """A running controller and its worker, both serving."""

    controller: ServerProcess
    worker: ServerProcess
    controller_connection: Connection
    worker_connection: Connection

    @property
    def processes(self) -> tuple[ServerProcess, ...]:
        """Both processes."""
        return (self.controller, self.worker)


def check_worker_installed() -> None:
    """Raises PrefixdError where the worker's libraries are missing."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise PrefixdError(
            f"the worker needs {' and '.join(missing)}: pip install '.[worker]' (in a checkout)"
        )


@contextlib.contextmanager
def servers(config: ServersConfig, *, report: Callable[[str], None]) -> Iterator[Servers]:
    """Starts a controller and a worker, waits until both serve, and stops both at the end.

    `report` is told what is being waited for. Raises ProcessEnded or ProcessSlow.
    """
    started: list[ServerProcess] = []
    try:
        report("starting the controller")
        controller = ServerProcess(
            "controller",
            module="prefixd.controller",
            arguments=("--listen", config.controller_listen, *config.controller_arguments),
            report=report,
        )
        started.append(controller)
        controller_connection = Connection(controller.address(timeout_s=CONTROLLER_READY_S))
        with ControllerClient(controller_connection) as controller_client:
            controller.wait_until_serving(controller_client, timeout_s=CONTROLLER_READY_S)
        report("starting the worker and loading its model")
        worker = ServerProcess(
            "worker",
            module="prefixd.worker",
            arguments=(
                *("--controller", controller_connection.address),
                *("--listen", config.worker_listen),
                *config.worker_arguments,
            ),
            report=report,
        )
        started.append(worker)
        worker_connection = Connection(worker.address(timeout_s=WORKER_READY_S))
        with WorkerClient(worker_connection) as worker_client:
            worker.wait_until_serving(worker_client, timeout_s=WORKER_READY_S)
        yield Servers(controller, worker, controller_connection, worker_connection)
    finally:
        _stop(started)


def _stop(started: Sequence[ServerProcess]) -> None:
    """Stops the worker, then the controller, whatever signals arrive meanwhile."""
    with _signals_ignored():
        deadline_s = time.monotonic() + STOP_S
        # Latest first; each leaves a reserve for every process that was started before it.
        for earlier_count, process in reversed(list(enumerate(started))):
            process.stop_by(deadline_s - earlier_count * STOP_RESERVE_S)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM, so that a second Ctrl-C cannot leave a child behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in stops]
    try:
        yield
    finally:
        for number, handler in zip(stops, handlers, strict=True):
            signal.signal(number, handler)


def _signal(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name


def _event(line: str) -> dict[str, Any]:
    """A log line's keys; none where the line is no JSON object."""
    if not line.startswith("{"):
        return {}
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}
