"""TLS for the worker's own addresses and for its way to the controller."""

from dataclasses import dataclass
from pathlib import Path

import grpc


class TlsUnusable(Exception):
    """A PEM file cannot be read."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of the worker's identity; `client_ca` makes clients show a certificate too."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is opened with. Raises TlsUnusable."""
        return grpc.ssl_server_credentials(
            [(_read(self.private_key), _read(self.certificate))],
            root_certificates=_read(self.client_ca) if self.client_ca else None,
            require_client_auth=self.client_ca is not None,
        )


@dataclass(frozen=True, slots=True)
class ControllerTls:
    """PEM files for the way to the controller: its authority, and what it asks us to show."""

    ca: Path
    certificate: Path | None = None
    private_key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel is opened with. Raises TlsUnusable."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.private_key) if self.private_key else None,
            certificate_chain=_read(self.certificate) if self.certificate else None,
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{path} cannot be read: {error.strerror}") from error
