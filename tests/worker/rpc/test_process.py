"""The process: options, signals, no controller."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from typer.testing import CliRunner

from prefixd.worker.__main__ import app
from prefixd.worker.rpc.listening import AddressUnusable, SocketLock
from tests.support.controller import ControllerThread, stubs
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    WorkerProcess,
    client,
    error_reason,
    text_request,
    wait_idle,
    worker_process,
)

STOP_S_MAX = 5.0
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def options(folder: Path, controller_address: str, *more: str) -> list[str]:
    """Options of a small worker process."""
    return [
        *("--model", str(folder), "--attention-backend", "strict", "--controller"),
        *(controller_address, "--pool-name", "tiny", "--block-count", "256", *more),
    ]


@pytest.fixture(scope="module")
def lonely(tiny_folder: Path) -> Iterator[WorkerProcess]:
    """A worker on the CPU whose controller's address nobody serves."""
    choices = ("--device", "cpu", "--attention-backend", "auto")
    with worker_process(*options(tiny_folder, "127.0.0.1:1", *choices)) as worker:
        yield worker


def test_worker_without_controller_says_so(lonely: WorkerProcess) -> None:
    """It serves, is not healthy, refuses to generate, counts tokens, and logs why."""
    with client(lonely.address) as calls:
        assert calls.health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            calls.generate(text_request("hi"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error_reason(caught.value) == "CONTROLLER_UNAVAILABLE"
        assert calls.info().epoch == 0
    assert any("controller_unreachable" in line for line in lonely.log)
    assert [line for line in lonely.log if not line.startswith("{")] == []


def test_log_and_info_name_the_backend_that_runs(lonely: WorkerProcess) -> None:
    """Which one "auto" is on this device."""
    events = [json.loads(line) for line in lonely.log if line.startswith("{")]
    (loaded,) = [event for event in events if event["event"] == "model_loaded"]
    assert (loaded["device"], loaded["attention_backend"]) == ("cpu", "torch")
    with client(lonely.address) as calls:
        assert calls.info().attention_backend == "torch"


def test_the_pool_is_told_before_it_is_served(lonely: WorkerProcess) -> None:
    """How much memory it takes, for how many blocks and tokens: one line in the log."""
    events = [json.loads(line) for line in lonely.log if line.startswith("{")]
    names = [event["event"] for event in events]
    (told,) = [event for event in events if event["event"] == "model_setup"]
    assert re.fullmatch(
        r"CPU: pool [\d.]+ .iB: [\d,]+ blocks of \d+, [\d,]+ tokens, .* each in float32",
        told["step"],
    )
    assert names.index("model_setup") < names.index("worker_started")


def test_reflection_lists_the_services(lonely: WorkerProcess) -> None:
    """Tools find the worker's service and health."""
    with grpc.insecure_channel(lonely.address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()

    assert {"prefixd.v1.WorkerService", "grpc.health.v1.Health"} <= set(services)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_told_to_end_it_ends_cleanly(
    tiny_folder: Path, controller: ControllerThread, number: signal.Signals
) -> None:
    """Within five seconds, in the middle of an answer, which ends as DRAINING; the pool is back."""
    with (
        worker_process(*options(tiny_folder, controller.address)) as worker,
        client(worker.address) as calls,
        stubs(controller.address) as control,
    ):
        calls.wait_serving()
        fields = {"token_count_max": 1_000, "ignore_end_of_sequence": True}
        answer = calls.worker.Generate(text_request("long", **fields))
        next(answer)
        told = time.monotonic()
        worker.process.send_signal(number)

        with pytest.raises(grpc.RpcError) as caught:
            list(answer)
        status = worker.wait_ended()

        assert time.monotonic() - told < STOP_S_MAX
        assert status == 0
        assert error_reason(caught.value) == "DRAINING"
        with pytest.raises(grpc.RpcError) as gone:
            wait_idle(control, "tiny")
        assert gone.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        (
            ["--attention-backend", "none"],
            2,
            "--attention-backend is 'none', but must be one of auto",
        ),
        (["--block-size", "0"], 2, "--block-size is 0"),
        (["--block-size", "4097"], 2, "--block-size is 4097, but must be 1 to 4096"),
        (["--block-count", "1"], 2, "--block-count is 1"),
        (["--token-budget", "3"], 2, "--token-budget is 3, but must be above --running-seq"),
        (["--token-budget", str(2**40)], 2, f"--token-budget is {2**40}, but must be 1 to"),
        (["--running-sequence-count-max", "1025"], 2, "-count-max is 1025, but must be 1 to 1024"),
        (["--device", "abacus"], 2, "--device is 'abacus', but must be one of auto, cpu, cuda,"),
        (["--dtype", "int3"], 2, "--dtype is 'int3', but must be one of auto, float32, bfloat16,"),
        (["--lease-ms", "-4"], 2, "--lease-ms is -4, but must be at least 0"),
        (["--controller-wait-s", "nan"], 2, "--controller-wait-s is nan, but must be at least 0"),
        (["--kv-dtype", "int3"], 2, "--kv-dtype is 'int3', but must be one of auto, int8, fp8"),
        (["--log-level", "loud"], 2, "--log-level is 'loud', but must be one of"),
        (["--lora", "poet"], 2, "'poet' is neither NAME=FOLDER nor NAME@VERSION=FOLDER"),
        (["--lora", "a=/x", "--lora", "a=/y"], 2, "--lora gives two adapters one name"),
        (["--lora", "poet=/no/such/folder"], 3, "the adapter 'poet' cannot be used"),
        (["--model-version", "v" * 257], 2, "--model-version has 257 characters"),
        (["--listen", "nowhere"], 2, "'nowhere' is neither HOST:PORT nor unix:PATH"),
        (["--listen", f"unix:/{'x' * 107}"], 2, "is longer than 107 bytes"),
        (["--controller", "nowhere"], 2, "'nowhere' is neither HOST:PORT nor unix:PATH"),
        (["--block-count", str(2**40)], 2, f"--block-count is {2**40}, a pool of"),
        (["--model", "/no/such/folder"], 3, "model '/no/such/folder' is unavailable"),
    ],
)
def test_bad_option_gives_one_clear_line(
    tiny_folder: Path, bad: list[str], status: int, message: str
) -> None:
    """What is wrong stands in one line, without a traceback; the exit status tells the kind."""
    result = CliRunner().invoke(app, [*options(tiny_folder, "127.0.0.1:1"), *bad])

    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit)
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert message in line


def test_model_that_the_guard_refuses_gives_one_clear_line(tmp_path: Path) -> None:
    """A model whose positions depend on the batch cannot share KV: the reason is named."""
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))

    result = CliRunner().invoke(app, options(folder, "127.0.0.1:1"))

    assert result.exit_code == 3
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert "is refused" in line
    assert "dynamic" in line


def test_second_worker_on_an_address_fails(lonely: WorkerProcess, tiny_folder: Path) -> None:
    """The second says that the address is in use, and ends."""
    second = [*options(tiny_folder, "127.0.0.1:1"), "--listen", lonely.address]
    result = CliRunner().invoke(app, second)

    assert result.exit_code == 1
    assert f"cannot listen on {lonely.address}" in result.stderr.splitlines()[-1]


def test_socket_belongs_to_one_worker_until_it_is_gone(tmp_path: Path) -> None:
    """The first keeps its socket; a dead one's socket file is taken over."""
    path = tmp_path / "worker.sock"
    first = SocketLock(path)

    with pytest.raises(AddressUnusable, match="served by another process"):
        SocketLock(path)
    first.release()
    path.touch()  # what a killed worker leaves
    second = SocketLock(path)

    assert not path.exists()
    second.release()


def test_pool_that_the_controller_refuses_ends_the_worker(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A pool name that no controller takes: one clear line, and no endless trying."""
    bad = ["--listen", "127.0.0.1:0", "--pool-name", "no spaces please"]
    result = CliRunner().invoke(app, [*options(tiny_folder, controller.address), *bad])

    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert "pool_name must be" in line
    assert "FIELD_INVALID" in line


def test_triton_on_the_cpu_of_a_machine_with_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels could not read the model's memory."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    result = CliRunner().invoke(app, ["--attention-backend", "triton", "--device", "cpu"])
    assert result.exit_code == 2
    assert "triton computes on GPUs, but --device is cpu" in result.stderr


def test_bad_name_is_refused_before_torch_is_imported() -> None:
    """A typing error costs no seconds: nothing on the way to the check imports torch."""
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from prefixd.worker.__main__ import app;"
        "app(['--attention-backend', 'none'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("prefixd worker: --attention-backend is 'none', but must be one")
