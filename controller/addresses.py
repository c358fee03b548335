"""Listen addresses: TCP (`HOST:PORT`, `[IPV6]:PORT`) and unix sockets (`unix:PATH`)."""

import fcntl
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

CONTROLLER_ADDRESS_DEFAULT = "127.0.0.1:7600"
"""Where a controller listens and where its clients look for it, unless told otherwise."""
PORT_MAX = 65_535
UNIX_PATH_BYTES_MAX = 107
"""What the kernel's socket address holds, without its terminator."""


class AddressInvalid(Exception):
    """An address cannot be read."""


class AddressUnavailable(Exception):
    """An address cannot be served: another process does, or it is not this machine's."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port of one host; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """The address in gRPC's words."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket."""

    path: Path

    @property
    def target(self) -> str:
        """The address in gRPC's words."""
        return f"unix:{self.path}"

    @property
    def is_local(self) -> bool:
        """Always: a unix socket never leaves the machine."""
        return True


Address = TcpAddress | UnixAddress


def address(text: str) -> Address:
    """Reads a listen address. Raises AddressInvalid with what is wrong."""
    if text.startswith("unix:"):
        path = Path(os.path.abspath(text.removeprefix("unix:").removeprefix("//")))
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise AddressInvalid(f"socket path {path} is longer than {UNIX_PATH_BYTES_MAX} bytes")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise AddressInvalid(f"{text!r} is neither HOST:PORT nor unix:PATH")
    return TcpAddress(host=host, port=int(port))


def bind_obstacle(one: Address) -> str:
    """Says why an address could not be bound, by trying again: gRPC keeps the cause to itself."""
    family, target = _socket_target(one)
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        return _reason(error)
    return "the address could not be bound"


def _socket_target(one: Address) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if isinstance(one, UnixAddress):
        return socket.AF_UNIX, os.fspath(one.path)
    return socket.AF_INET6 if ":" in one.host else socket.AF_INET, (one.host, one.port)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class SocketLock:
    """Makes one process the owner of a unix socket path, through a lock file beside it.

    gRPC takes over an existing socket file silently, so the file itself protects nothing. The lock
    goes with the process, whatever ends it; so a socket file found under the lock is a dead one.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._lock_path = socket_path.with_name(socket_path.name + ".lock")
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock and removes a dead socket file. Raises AddressUnavailable."""
        while self._descriptor is None:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise AddressUnavailable(
                    f"unix:{self._socket_path} is served by another process"
                ) from None
            # Its last owner may have removed the file between our open and our lock.
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        self._socket_path.unlink(missing_ok=True)

    def release(self) -> None:
        """Removes socket and lock file, then lets go. A lock not held is let go already."""
        if self._descriptor is None:
            return
        self._socket_path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        try:
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AddressUnavailable(
                f"cannot listen on unix:{self._socket_path}: {_reason(error)}"
            ) from error

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._lock_path.stat())
        except FileNotFoundError:
            return False
