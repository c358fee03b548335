"""`prefixd up` as a process: it starts both servers, tells when they are ready, and stops both."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixd.clients import Connection, ControllerClient, WorkerClient
from prefixd.clients.cli.main import EXIT_USAGE
from tests.support.tiny_model import write_tiny_model

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.5
ANY_PORT = "127.0.0.1:0"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def up(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `prefixd up --json` for the length of the block."""
    command = [sys.executable, "-m", "prefixd.clients.cli.main", "up", "--json"]
    # gRPC is as loud as people have it, not as the tests do.
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for the ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    told: dict[str, Any] = json.loads(line)
    return told


def lives(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(READY_TIMEOUT_S)
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_up_serves_until_a_signal_and_stops_both(model_folder: Path, number: int) -> None:
    """Both servers answer once it is ready, the worker with what it was told; a signal ends all
    within 5 seconds, with code 0."""
    addresses = ("--controller-listen", ANY_PORT, "--worker-listen", ANY_PORT)
    options = ("--model", str(model_folder), "--block-count", "64", "--kv-dtype", "int8")
    with up(*addresses, *options) as process:
        told = ready(process)
        with (
            ControllerClient(Connection(told["controller_address"])) as controller,
            WorkerClient(Connection(told["worker_address"])) as worker,
        ):
            assert worker.generate("hello").prompt_token_count == len("hello")
            assert worker.worker_info().kv_dtype == "int8"
            (pool,) = controller.pools()
            assert pool.block_count == 64
            assert pool.kv_format.startswith("int8 ")
        begin_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(READY_TIMEOUT_S) == 0
        assert time.monotonic() - begin_s < STOP_TIMEOUT_S
        assert not lives(told["controller_pid"])
        assert not lives(told["worker_pid"])


@pytest.mark.timeout(READY_TIMEOUT_S)
def test_up_ends_with_an_error_if_a_server_dies(model_folder: Path) -> None:
    """The worker is killed: the controller is stopped, and the last log lines are shown."""
    addresses = ("--controller-listen", ANY_PORT, "--worker-listen", ANY_PORT)
    with up(*addresses, "--model", str(model_folder), "--block-count", "64") as process:
        told = ready(process)
        os.kill(told["worker_pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=READY_TIMEOUT_S)
        assert process.returncode == 1
        assert errors.splitlines()[-1] == "prefixd: the worker ended by itself (killed by SIGKILL)"
        assert "  worker: {" in errors
        assert not lives(told["controller_pid"])


def test_up_tells_why_an_address_cannot_be_had(model_folder: Path) -> None:
    """Somebody else listens at the controller's address: an error that shows the reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with up("--controller-listen", taken, "--model", str(model_folder)) as process:
            _, errors = process.communicate(timeout=READY_TIMEOUT_S)
    assert process.returncode == 1
    reason, end = errors.splitlines()
    assert taken in reason
    assert end.startswith("prefixd: the controller ended by itself")


def test_up_shows_the_workers_words_about_a_bad_option(model_folder: Path) -> None:
    """Options that `up` does not know go to the worker, which refuses this one."""
    addresses = ("--controller-listen", ANY_PORT, "--worker-listen", ANY_PORT)
    with up(*addresses, "--model", str(model_folder), "--bogus") as process:
        _, errors = process.communicate(timeout=READY_TIMEOUT_S)
    assert process.returncode == EXIT_USAGE
    assert "--bogus" in errors
    assert "Traceback" not in errors
