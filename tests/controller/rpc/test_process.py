import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import cbor2
import grpc
import pytest
from typer.testing import CliRunner

from prefixd.controller.__main__ import app
from prefixd.controller.config import Config
from prefixd.v1 import errors_pb2, inspect_pb2
from tests.support.certificates import write_certificates
from tests.support.controller import (
    ANY_PORT,
    ControllerProcess,
    Stubs,
    controller_process,
    controller_thread,
    stubs,
)
from tests.support.driver import Driver, SessionClient

BLOCK_TORCH = """
import runpy, sys
for name in ("torch", "triton", "transformers"):
    sys.modules[name] = None
sys.argv = ["controller", "--listen", "127.0.0.1:0"]
runpy.run_module("prefixd.controller", run_name="__main__")
"""

DRIVE_UNTIL_KILLED = """
import sys
from tests.support.controller import stubs
from tests.support.driver import Driver, open_entry, session
with stubs(sys.argv[1]) as calls:
    driver = Driver(calls, lease={"nanos": 200_000_000})
    with session(driver) as client:
        client.step(driver.request(open_entry(1, range(10))))
        print("driving", flush=True)
        client.receive()
"""


def pool_of(calls: Stubs) -> inspect_pb2.Pool:
    """The accounts of the driver's pool."""
    return calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool


def server_info(address: str) -> inspect_pb2.GetServerInfoResponse:
    """Asks a controller for its description."""
    with stubs(address) as calls:
        return calls.inspect.GetServerInfo(
            inspect_pb2.GetServerInfoRequest(), wait_for_ready=True, timeout=10
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_cleanly(number):
    """SIGTERM and SIGINT say goodbye to an open session and end within 5 seconds, status 0."""
    with controller_process() as controller, stubs(controller.address) as calls:
        client = SessionClient(calls)
        client.start(Driver(calls))
        started = time.monotonic()
        controller.process.send_signal(number)
        assert client.receive().goodbye.reason == errors_pb2.ERROR_REASON_DRAINING
        assert controller.wait_ended() == 0
        assert time.monotonic() - started < 5
        client.cancel()
        events = [json.loads(line)["event"] for line in controller.log]
    assert events[0] == "controller_started"
    assert events[-1] == "controller_stopped"
    assert "session_started" in events


def test_second_controller_on_a_tcp_port_fails_to_start():
    """A port in use is one clear line and status 1, and the first controller goes on."""
    with controller_process() as first:
        second = ControllerProcess("--listen", first.address)
        try:
            assert second.wait_ended() == 1
            said = f"prefixd controller: cannot listen on {first.address}: address already in use\n"
            assert second.log == [said]
        finally:
            second.close()
        assert server_info(first.address).pool_count == 0


def test_second_controller_on_a_unix_socket_fails_to_start(tmp_path):
    """A socket in use is not stolen; it goes with the first controller."""
    listen = f"unix:{tmp_path}/controller.sock"
    with controller_process("--listen", listen) as first:
        second = ControllerProcess("--listen", listen)
        try:
            assert second.wait_ended() == 1
            assert len(second.log) == 1
            assert "served by another process" in second.log[0]
        finally:
            second.close()
        assert server_info(first.address).pool_count == 0
        assert first.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_socket_of_a_killed_controller_is_taken_over(tmp_path):
    """A socket file that a killed controller left behind is no obstacle."""
    listen = f"unix:{tmp_path}/controller.sock"
    with controller_process("--listen", listen) as killed:
        killed.process.kill()
        killed.wait_ended()
    assert (tmp_path / "controller.sock").exists()
    with controller_process("--listen", listen) as successor:
        assert server_info(successor.address).pool_count == 0


def test_one_controller_serves_several_addresses(tmp_path):
    """TCP and unix addresses reach the same pools."""
    options = ("--listen", "127.0.0.1:0", "--listen", f"unix:{tmp_path}/controller.sock")
    with controller_process(*options) as controller:
        tcp, unix = controller.addresses
        with stubs(tcp) as calls:
            Driver(calls)
        assert server_info(unix).pool_count == 1


def test_failed_start_leaves_no_socket(tmp_path):
    """Where one address is taken nothing is left of the others."""
    with controller_process() as first:
        second = ControllerProcess(
            "--listen", f"unix:{tmp_path}/controller.sock", "--listen", first.address
        )
        try:
            assert second.wait_ended() == 1
        finally:
            second.close()
    assert list(tmp_path.iterdir()) == []


def test_controller_runs_without_torch():
    """With torch, triton and transformers blocked a controller starts and drives a pool."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCK_TORCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["addresses"][0]
        with stubs(address) as calls:
            assert Driver(calls).step().step_id == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_killed_driver_leaves_nothing_held_once_its_lease_is_out(repository_folder):
    """A driver that is killed keeps its blocks for the length of its lease, then all are free."""
    with controller_process() as controller, stubs(controller.address) as calls:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVE_UNTIL_KILLED, controller.address],
            stdout=subprocess.PIPE,
            cwd=repository_folder,
        )
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == b"driving\n"
            assert pool_of(calls).held_block_count == 3
        finally:
            driver.kill()
            driver.communicate()
        while calls.inspect.ListPools(inspect_pb2.ListPoolsRequest()).pools:
            pass
        assert Driver(calls).step(executed_step_id=0).available_block_count == 63
        assert controller.stop() == 0
        events = [json.loads(line)["event"] for line in controller.log]
    assert events.index("session_ended") < events.index("lease_expired")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--listen", "nowhere"), "neither HOST:PORT nor unix:PATH"),
        (("--listen", "0.0.0.0:0"), "--allow-plaintext"),
        (("--hash", "md5"), "md5"),
        (("--log-level", "loud"), "debug, info, warning, error"),
        (("--tls-key", "key.pem"), "--tls-certificate"),
        (("--tls-key", "/no.pem", "--tls-certificate", "/no.pem"), "TLS files cannot be used"),
        (("--tls-key", __file__, "--tls-certificate", __file__), "TLS files cannot be used"),
        (("--listen", "unix:/" + "x" * 120), "longer than 107 bytes"),
    ],
)
def test_bad_option_is_one_clear_line(options, said):
    """An option that cannot be used ends the process with status 2 and says why."""
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("prefixd controller: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_unknown_option_is_refused_without_a_traceback():
    """A misspelt option ends with status 2 and a usage line."""
    controller = ControllerProcess("--lisen", "127.0.0.1:0")
    try:
        assert controller.wait_ended() == 2
        text = "".join(controller.log)
        assert "--listen" in text
        assert "Traceback" not in text
    finally:
        controller.close()


def test_optimized_python_is_refused():
    """Without assertions a controller does not run."""
    ended = subprocess.run(
        [sys.executable, "-O", "-m", "prefixd.controller"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == "prefixd controller: refuses to run under python -O\n"


@pytest.mark.parametrize(
    ("option", "variable", "seed"),
    [
        ("a", "1", "a"),
        (None, "1", "1"),
        (None, "", ""),
        (None, None, "vllm-none-hash"),
    ],
)
def test_s01_seed_is_the_option_else_pythonhashseed(monkeypatch, option, variable, seed):
    """S1: the option decides, else PYTHONHASHSEED verbatim, else the fixed seed of sha256*."""
    if variable is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", variable)
    with controller_thread(Config(listen=ANY_PORT, hash_seed=option)) as controller:
        root = server_info(controller.address).root_hash_hex
    assert root == hashlib.sha256(cbor2.dumps(seed, canonical=True)).hexdigest()


def test_s01_random_seed_is_warned_of(monkeypatch):
    """S1: xxhash* without a seed starts anywhere, and the log says so."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = Config(listen=ANY_PORT, hash_algorithm="xxhash_cbor")
    roots = set()
    for _ in range(2):
        with controller_thread(config) as controller:
            roots.add(server_info(controller.address).root_hash_hex)
            events = [event["event"] for event in controller.log_events]
        assert "hash_seed_random" in events
    assert len(roots) == 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder with a certificate authority, and a server's and a client's certificate."""
    return write_certificates(tmp_path_factory.mktemp("certificates"))


def test_mutual_tls_admits_known_clients_only(certificates):
    """With a client authority a client needs its certificate, and can then drive a pool."""
    read = {path.name: path.read_bytes() for path in certificates.glob("*.*")}
    with controller_process(
        "--listen",
        "127.0.0.1:0",
        "--tls-certificate",
        str(certificates / "server.pem"),
        "--tls-key",
        str(certificates / "server.key"),
        "--tls-client-ca",
        str(certificates / "ca.pem"),
    ) as controller:
        known = grpc.ssl_channel_credentials(read["ca.pem"], read["client.key"], read["client.pem"])
        unknown = grpc.ssl_channel_credentials(read["ca.pem"])
        request = inspect_pb2.GetServerInfoRequest()
        method = "/prefixd.v1.InspectService/GetServerInfo"
        answers = []
        for credentials in (known, unknown):
            with grpc.secure_channel(controller.address, credentials) as channel:
                call = channel.unary_unary(
                    method,
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=inspect_pb2.GetServerInfoResponse.FromString,
                )
                try:
                    call(request, timeout=10)
                    answers.append("answered")
                except grpc.RpcError as error:
                    answers.append(error.code().name)
    assert answers == ["answered", "UNAVAILABLE"]


def test_standard_output_carries_one_line():
    """Standard output is for the line that says every address answers; logs go elsewhere."""
    with controller_process() as controller:
        assert controller.stop() == 0
        assert controller.process.stdout is not None
        assert controller.process.stdout.read() == ""
