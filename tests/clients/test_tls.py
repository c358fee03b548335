"""Clients over mutual TLS against a controller that shows and asks for certificates."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixd.clients import Connection, ControllerClient, ServerUnreachable, Tls
from prefixd.clients.cli.main import EXIT_UNREACHABLE, run
from tests.support.certificates import write_certificates
from tests.support.controller import controller_process


@dataclass(frozen=True)
class Secured:
    """A controller's address, and the folder with everybody's certificates."""

    address: str
    folder: Path

    @property
    def trust(self) -> Tls:
        """What a known client has."""
        return Tls(self.folder / "ca.pem", self.folder / "client.pem", self.folder / "client.key")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A controller with mutual TLS."""
    folder = write_certificates(tmp_path_factory.mktemp("certificates"))
    options = {"certificate": "server.pem", "key": "server.key", "client-ca": "ca.pem"}
    arguments = [
        text for name, file in options.items() for text in (f"--tls-{name}", str(folder / file))
    ]
    with controller_process("--listen", "127.0.0.1:0", *arguments) as controller:
        yield Secured(controller.address, folder)


def test_a_known_client_is_served(secured: Secured) -> None:
    """Authority, certificate and key from files."""
    with ControllerClient(Connection(secured.address, tls=secured.trust)) as client:
        assert client.server_info().pool_count == 0


@pytest.mark.parametrize("trust", ["none", "no certificate"])
def test_an_unknown_client_is_not_served(secured: Secured, trust: str) -> None:
    """Without TLS, or without a certificate of its own, a client gets one typed error."""
    tls = None if trust == "none" else Tls(secured.folder / "ca.pem")
    with (
        ControllerClient(Connection(secured.address, tls=tls)) as client,
        pytest.raises(ServerUnreachable),
    ):
        client.server_info()


def test_a_server_without_tls_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """--tls against a plaintext server: the line speaks of TLS, not of the library's last word."""
    with controller_process() as controller:
        code = run(["--tls", "pools", "--controller", controller.address])
    assert (code, "TLS handshake failed" in capsys.readouterr().err) == (EXIT_UNREACHABLE, True)


def test_a_file_without_certificates_is_told_as_such(
    secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    """--ca-file with something else in it: the line speaks of the files."""
    code = run(["--ca-file", __file__, "pools", "--controller", secured.address])
    assert (code, "not usable PEM" in capsys.readouterr().err) == (EXIT_UNREACHABLE, True)


def test_the_command_line_takes_the_files(
    secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    """--ca-file, --certificate-file and --key-file make every command use TLS."""
    folder = secured.folder
    files = ("--ca-file", "ca.pem", "--certificate-file", "client.pem", "--key-file", "client.key")
    options = [text if text.startswith("--") else str(folder / text) for text in files]
    assert run([*options, "pools", "--controller", secured.address]) == 0
    assert capsys.readouterr().out == "no pools\n"
