"""A server in a process of its own, to be signalled and killed."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping


class ServerProcess:
    """`python -m MODULE OPTIONS`; `log` collects its standard error.

    Its first line on standard output says which addresses answer.
    """

    def __init__(
        self, module: str, *options: str, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self.log: list[str] = []
        self.addresses: tuple[str, ...] = ()
        self._module = module
        self._timeout_s = timeout_s
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    def wait_started(self) -> None:
        """Waits for the line that says every address answers. Raises RuntimeError if it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.wait_ended()
            raise RuntimeError(f"{self._module} ended with status {status}: {''.join(self.log)}")
        self.addresses = tuple(json.loads(line)["addresses"])

    def wait_ended(self, timeout_s: float | None = None) -> int:
        """Waits for the process to end, as long as all waits take at most; returns its status."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        status = self.process.wait(limit_s)
        self._reader.join(limit_s)
        return status

    def stop(self) -> int:
        """Sends SIGTERM and waits; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_ended()

    def close(self) -> None:
        """Ends the process, whatever state it is in, and closes its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait_ended()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)
