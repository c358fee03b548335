"""Addresses that the worker serves: TCP (`HOST:PORT`) and unix sockets (`unix:PATH`)."""

import fcntl
import ipaddress
import os
from pathlib import Path
from typing import Any

import grpc

WORKER_ADDRESS_DEFAULT = "127.0.0.1:7601"
"""Where a worker listens and where its clients look for it, unless told otherwise."""
CONTROLLER_ADDRESS_DEFAULT = "127.0.0.1:7600"
"""Where a worker looks for its controller, unless told otherwise."""
UNIX_PREFIX = "unix:"
PORT_MAX = 65_535
UNIX_PATH_BYTES_MAX = 107
"""What the kernel's socket address holds, without its terminator."""


class AddressInvalid(Exception):
    """An address cannot be read."""


class AddressUnusable(Exception):
    """An address cannot be served."""


def checked_target(text: str) -> str:
    """The address as gRPC takes it. Raises AddressInvalid with what is wrong."""
    if text.startswith(UNIX_PREFIX):
        path = os.path.abspath(text.removeprefix(UNIX_PREFIX).removeprefix("//"))
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise AddressInvalid(f"socket path {path} is longer than {UNIX_PATH_BYTES_MAX} bytes")
        return f"{UNIX_PREFIX}{path}"
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise AddressInvalid(f"{text!r} is neither HOST:PORT nor unix:PATH")
    return text


def is_local(target: str) -> bool:
    """Whether only this machine can reach the address."""
    if target.startswith(UNIX_PREFIX):
        return True
    host = target.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SocketLock:
    """Owns a unix socket path, through a lock file beside it.

    gRPC takes an existing socket file over silently, so a second worker would steal the address.
    The lock goes with the process; a socket file that is found under the lock is a dead one.
    """

    def __init__(self, path: Path) -> None:
        """Takes the path. Raises AddressUnusable if another process has it."""
        self._path = path
        try:
            self._descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AddressUnusable(f"cannot listen on unix:{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise AddressUnusable(f"unix:{path} is served by another process") from None
        path.unlink(missing_ok=True)

    def release(self) -> None:
        """Removes the socket file and lets go. The lock file stays: others may be waiting on it."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Listening:
    """The addresses of one gRPC server."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self._locks: list[SocketLock] = []

    def bind(
        self,
        server: grpc.aio.Server,
        targets: tuple[str, ...],
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        """Binds targets as `checked_target` gives them; without credentials in the clear.

        Raises:
            AddressUnusable: names the one.
        """
        try:
            self.addresses = tuple(self._bind(server, target, credentials) for target in targets)
        except AddressUnusable:
            self.release()
            raise

    def release(self) -> None:
        """Lets go of the socket files; the server's end closes the ports."""
        while self._locks:
            self._locks.pop().release()

    def _bind(self, server: Any, target: str, credentials: grpc.ServerCredentials | None) -> str:
        is_unix = target.startswith(UNIX_PREFIX)
        if is_unix:
            self._locks.append(SocketLock(Path(target.removeprefix(UNIX_PREFIX))))
        try:
            if credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, credentials)
        except RuntimeError as error:
            raise AddressUnusable(f"cannot listen on {target}: in use or not ours") from error
        return target if is_unix else f"{target.rpartition(':')[0]}:{port}"
