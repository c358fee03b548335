"""Where a server is, how long to wait for it, and how to trust it."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc import aio

from prefixd.clients.errors import AddressInvalid

CONTROLLER_ADDRESS_DEFAULT = "127.0.0.1:7600"
"""Where a controller listens unless told otherwise."""
WORKER_ADDRESS_DEFAULT = "127.0.0.1:7601"
"""Where a worker listens unless told otherwise."""
TIMEOUT_S_DEFAULT = 10.0
"""Deadline of a call that names none."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Size of one gRPC message; the servers' limit."""
PORT_MAX = 65_535
"""Largest TCP port."""
UNIX_SCHEME = "unix:"
"""What the address of a unix socket begins with."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Trust in a server and, for mutual TLS, the client's own certificate (PEM files).

    Without `ca_file` the system's authorities count. `certificate_file` and `key_file` go together.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; OSError where one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.certificate_file),
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """One server's address with the deadline and the trust of its calls.

    `address` is `host:port` or `unix:/path`; anything else raises AddressInvalid.
    """

    address: str
    timeout_s: float = TIMEOUT_S_DEFAULT
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Checks the address, so that a typing error never waits for a deadline."""
        check_address(self.address)

    def open_channel(self) -> grpc.Channel:
        """Opens a synchronous channel; it connects with its first call."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=_channel_options())
        return grpc.secure_channel(self.address, self.tls.credentials(), options=_channel_options())

    def open_aio_channel(self) -> aio.Channel:
        """Opens an asyncio channel; it connects with its first call."""
        if self.tls is None:
            return aio.insecure_channel(self.address, options=_channel_options())
        return aio.secure_channel(self.address, self.tls.credentials(), options=_channel_options())


def check_address(address: str) -> None:
    """Raises AddressInvalid unless `address` is `host:port` or `unix:/path`."""
    if address.startswith(UNIX_SCHEME):
        if not address.removeprefix(UNIX_SCHEME).strip("/"):
            raise AddressInvalid(address, "names no socket file")
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise AddressInvalid(address, "is neither host:port nor unix:/path")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise AddressInvalid(address, "needs brackets around an IPv6 host: [host]:port")
    if not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= PORT_MAX:
        raise AddressInvalid(address, f"needs a port between 1 and {PORT_MAX}")


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        # Servers stand on loopback or in one's own network; a web proxy knows neither.
        ("grpc.enable_http_proxy", 0),
        # A server that is still starting is found soon after it listens.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
