"""TLS between client, worker and controller."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from prefixd.controller.config import Config, TlsConfig
from prefixd.v1 import worker_pb2
from prefixd.worker.config import ConfigInvalid, WorkerConfig
from prefixd.worker.rpc.tls import ControllerTls, ServerTls, TlsUnusable
from tests.support.certificates import write_certificates
from tests.support.controller import ANY_PORT, controller_thread
from tests.support.worker import Client, WorkerThread, strict_runner, text_request


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of this module."""
    return write_certificates(tmp_path_factory.mktemp("certificates"))


def test_all_three_speak_mutual_tls(tiny_folder: Path, certificates: Path) -> None:
    """The worker shows its certificate to the controller, and takes known clients only."""
    pem = {name: certificates / name for name in ("ca.pem", "server.pem", "server.key")}
    controller_tls = TlsConfig(pem["server.pem"], pem["server.key"], client_ca=pem["ca.pem"])
    with controller_thread(Config(listen=ANY_PORT, tls=controller_tls)) as controller:
        config = WorkerConfig(
            controller=controller.address,
            controller_tls=ControllerTls(
                pem["ca.pem"], certificates / "client.pem", certificates / "client.key"
            ),
            tls=ServerTls(pem["server.pem"], pem["server.key"], client_ca=pem["ca.pem"]),
            pool_name="tls",
        )
        worker = WorkerThread(config, strict_runner(tiny_folder, block_count=64))
        worker.start()
        try:
            read = {path.name: path.read_bytes() for path in certificates.glob("*.*")}
            known = grpc.ssl_channel_credentials(
                read["ca.pem"], read["client.key"], read["client.pem"]
            )
            stranger = grpc.ssl_channel_credentials(read["ca.pem"])
            with grpc.secure_channel(worker.address, known) as channel:
                client = Client(channel)
                client.wait_serving()
                assert len(client.generate(text_request("hi", token_count_max=2)).token_ids) == 2
            with grpc.secure_channel(worker.address, stranger) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    Client(channel).worker.GetWorkerInfo(
                        worker_pb2.GetWorkerInfoRequest(), timeout=10
                    )
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        finally:
            worker.stop()


@pytest.mark.parametrize("target", ["0.0.0.0:7601", "[::]:7601", "example.org:7601"])
def test_other_machines_are_not_served_in_the_clear(target: str) -> None:
    """An address beyond this machine needs TLS, or the word that it is meant so."""
    with pytest.raises(ConfigInvalid, match="--allow-plaintext"):
        WorkerConfig(listen=(target,)).check()
    WorkerConfig(listen=(target,), plaintext_allowed=True).check()


@pytest.mark.parametrize("target", ["127.0.0.1:0", "[::1]:0", "localhost:1", "unix:/tmp/socket"])
def test_this_machine_is_served_in_the_clear(target: str) -> None:
    """Loopback and unix sockets need nothing."""
    WorkerConfig(listen=(target,)).check()


def test_missing_certificate_is_named(tmp_path: Path) -> None:
    """The file that cannot be read stands in the error."""
    with pytest.raises(TlsUnusable, match=r"none\.pem cannot be read"):
        ControllerTls(tmp_path / "none.pem").credentials()
