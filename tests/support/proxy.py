"""A TCP forwarder that can break every connection that runs through it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Forwards connections to a target; `cut` breaks those that are open."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_paused = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> int:
        """Breaks every open connection; returns how many there were."""
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return len(connections) // 2

    def pause(self) -> None:
        """Breaks every open connection, and each new one at once."""
        self._is_paused = True
        self.cut()

    def resume(self) -> None:
        """Forwards again."""
        self._is_paused = False

    def close(self) -> None:
        """Stops listening and breaks what is open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_paused:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
    source.close()


@contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """Runs a forwarder for the length of the block."""
    running = Proxy(target)
    try:
        yield running
    finally:
        running.close()
