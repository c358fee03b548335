"""Bad input against running servers: the documented error each time, and unchanged accounts."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from transformers import BertConfig

from prefixd.v1 import cache_pb2, errors_pb2, inspect_pb2, pool_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from tests.support.controller import (
    ControllerThread,
    Stubs,
    controller_process,
    controller_thread,
    stubs,
)
from tests.support.driver import Driver, decode_entry, open_entry, refused
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    WorkerThread,
    client,
    error_reason,
    strict_runner,
    text_request,
    tokens_request,
    worker_thread,
)

VOCABULARY_SIZE = 100
OPEN_TOKENS = (1, 2, 3, 4, 5, 6)
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
PROCESS_TIMEOUT_S = 60.0
Invalid = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerThread]:
    """A running controller."""
    with controller_thread() as running:
        yield running


@pytest.fixture(scope="module")
def raw(controller: ControllerThread) -> Iterator[Stubs]:
    """Its stubs."""
    with stubs(controller.address) as opened:
        yield opened


@pytest.fixture
def driver(raw: Stubs) -> Driver:
    """A pool of eight usable blocks in which one sequence is open; its step is confirmed."""
    driver = Driver(raw, "pool", block_count=9, block_size=4, vocabulary_size=VOCABULARY_SIZE)
    driver.step(open_entry(1, OPEN_TOKENS, sequence_id="present"))
    driver.step()
    return driver


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def worker(controller: ControllerThread, model_folder: Path) -> Iterator[Client]:
    """A worker on the same controller, with a pool of 15 usable blocks of 4."""
    runner = strict_runner(model_folder, block_count=16, block_size=4)
    config = WorkerConfig(controller=controller.address, pool_name="worker")
    with worker_thread(config, runner) as (_, calls):
        yield calls


def pool_of(raw: Stubs, pool_name: str) -> inspect_pb2.Pool:
    """A pool as GetPool shows it."""
    request = inspect_pb2.GetPoolRequest(pool_name=pool_name)
    pool: inspect_pb2.Pool = raw.inspect.GetPool(request).pool
    return pool


def accounts_of(raw: Stubs, pool_name: str) -> inspect_pb2.Pool:
    """A pool without what a refused entry may change: the number of its step, and time."""
    pool = pool_of(raw, pool_name)
    for name in ("applied_step_id", "executed_step_id", "lease_left"):
        pool.ClearField(name)
    return pool


def opened(**fields: object) -> cache_pb2.StepEntry:
    """A well-formed open entry of another sequence, but for the fields given."""
    return open_entry(2, **({"token_ids": (7, 8, 9)} | fields))  # type: ignore[arg-type]


CallCase = tuple[Callable[[Driver], cache_pb2.StepRequest], grpc.StatusCode, str, tuple[str, ...]]
STEPS: dict[str, CallCase] = {
    "token id out of range": (
        lambda driver: driver.request(opened(token_ids=(7, VOCABULARY_SIZE))),
        Invalid,
        "TOKEN_ID_INVALID",
        ("entries[0].open.token_ids[1]",),
    ),
    "empty prompt": (
        lambda driver: driver.request(opened(token_ids=())),
        Invalid,
        "PROMPT_EMPTY",
        ("entries[0].open.token_ids",),
    ),
    "duplicate handle": (
        lambda driver: driver.request(decode_entry((1, 6, 7), (1, 7, 8))),
        Invalid,
        "FIELD_INVALID",
        ("entries[0].decode.handles[1]",),
    ),
    "unknown pool": (
        lambda driver: changed(driver.request(opened()), pool_name="nobody"),
        grpc.StatusCode.NOT_FOUND,
        "POOL_NOT_FOUND",
        (),
    ),
    "stale epoch": (
        lambda driver: changed(driver.request(opened()), epoch=driver.registered.epoch - 1),
        grpc.StatusCode.ABORTED,
        "EPOCH_STALE",
        (),
    ),
    "foreign session token": (
        lambda driver: changed(driver.request(opened()), session_token=b"not the one"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "NOT_POOL_DRIVER",
        (),
    ),
    "step out of order": (
        lambda driver: driver.request(opened(), step_id=driver.applied_step_id + 2),
        grpc.StatusCode.ABORTED,
        "STEP_OUT_OF_ORDER",
        ("step_id",),
    ),
    "step id 0": (
        lambda driver: driver.request(opened(), step_id=0),
        grpc.StatusCode.ABORTED,
        "STEP_OUT_OF_ORDER",
        ("step_id",),
    ),
    "negative token budget": (
        lambda driver: driver.request(opened(), token_budget=-1),
        Invalid,
        "FIELD_INVALID",
        ("token_budget",),
    ),
    "one handle for two sequences": (
        lambda driver: driver.request(opened(), opened(sequence_id="other")),
        Invalid,
        "FIELD_INVALID",
        ("entries[1].open.handle",),
    ),
    "entry without content": (
        lambda driver: driver.request(cache_pb2.StepEntry()),
        Invalid,
        "FIELD_INVALID",
        ("entries[0]",),
    ),
} | {
    f"negative {name}": (
        lambda driver, name=name: driver.request(opened(**{name: -1})),  # type: ignore[misc]
        Invalid,
        "FIELD_INVALID",
        (f"entries[0].open.{name}",),
    )
    for name in (
        "schedule_token_count_max",
        "lookahead_slot_count",
        "must_fit_token_count",
        "preemption_count",
        "await_token_count_min",
    )
}


def changed(request: cache_pb2.StepRequest, **fields: object) -> cache_pb2.StepRequest:
    """The request with other fields."""
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize("case", STEPS)
def test_a_bad_step_is_refused_whole(raw: Stubs, driver: Driver, case: str) -> None:
    """Code, reason and field as documented; GetPool shows the very same pool."""
    make, code, reason, fields = STEPS[case]
    before = pool_of(raw, "pool")
    error = refused(lambda: raw.cache.Step(make(driver)))
    assert (code, reason, "prefixd", fields) == (
        error.code,
        error.reason,
        error.domain,
        error.fields,
    )
    assert before == pool_of(raw, "pool")


REFUSED_ENTRIES = {
    "prompt longer than the pool": (
        lambda: opened(token_ids=range(8 * 4 + 1)),
        errors_pb2.ERROR_REASON_SEQUENCE_EXCEEDS_POOL,
    ),
    "more than is free": (
        lambda: opened(token_ids=range(7 * 4)),
        errors_pb2.ERROR_REASON_POOL_EXHAUSTED,
    ),
    "sequence id that exists": (
        lambda: opened(sequence_id="present"),
        errors_pb2.ERROR_REASON_SEQUENCE_EXISTS,
    ),
    "handle that exists": (
        lambda: open_entry(1, (7, 8, 9), sequence_id="other"),
        errors_pb2.ERROR_REASON_SEQUENCE_EXISTS,
    ),
}


@pytest.mark.parametrize("case", REFUSED_ENTRIES)
def test_an_entry_that_the_state_forbids_changes_nothing(
    raw: Stubs, driver: Driver, case: str
) -> None:
    """The step is applied, its entry is refused with a reason, the accounts stay (S11)."""
    make, reason = REFUSED_ENTRIES[case]
    before = accounts_of(raw, "pool")
    (outcome,) = driver.step(make()).outcomes
    assert outcome.refusal.reason == reason
    assert before == accounts_of(raw, "pool")


def test_an_unknown_handle_is_a_deferred_row(raw: Stubs, driver: Driver) -> None:
    """A decode row of nobody is told apart from the others and changes nothing."""
    before = accounts_of(raw, "pool")
    (outcome,) = driver.step(decode_entry((77, 0, 7))).outcomes
    (row,) = outcome.decode.deferred_rows
    assert row.reason == errors_pb2.ERROR_REASON_SEQUENCE_NOT_FOUND
    assert before == accounts_of(raw, "pool")


def test_an_oversized_message_is_refused(
    raw: Stubs, driver: Driver, controller: ControllerThread
) -> None:
    """gRPC itself refuses what exceeds the limit; the pool never sees it."""
    before = pool_of(raw, "pool")
    request = driver.request(opened(sequence_id="x" * MESSAGE_BYTES_MAX))
    with (
        grpc.insecure_channel(
            controller.address, options=[("grpc.max_send_message_length", -1)]
        ) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        Stubs(channel).cache.Step(request)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert before == pool_of(raw, "pool")


BAD_POOLS = {
    "no block to hand out": ({"block_count": 1}, "block_count"),
    "negative block count": ({"block_count": -5}, "block_count"),
    "negative block size": ({"block_size": -1}, "block_size"),
    "no name": ({"pool_name": ""}, "pool_name"),
    "name with a space": ({"pool_name": "a b"}, "pool_name"),
}


@pytest.mark.parametrize("case", BAD_POOLS)
def test_a_bad_registration_makes_no_pool(raw: Stubs, driver: Driver, case: str) -> None:
    """The field is named, and the list of pools stays as it was."""
    fields, field = BAD_POOLS[case]
    before = raw.inspect.ListPools(inspect_pb2.ListPoolsRequest())
    wanted = {"pool_name": "another", "block_count": 4} | fields
    error = refused(lambda: raw.pool.RegisterPool(pool_pb2.RegisterPoolRequest(**wanted)))
    assert (Invalid, "FIELD_INVALID", (field,)) == (error.code, error.reason, error.fields)
    assert before == raw.inspect.ListPools(inspect_pb2.ListPoolsRequest())


PROMPTS = {
    "token id out of range": (tokens_request([70_000]), Invalid, "TOKEN_ID_INVALID"),
    "empty prompt": (tokens_request([]), Invalid, "PROMPT_EMPTY"),
    "no prompt": (worker_pb2.GenerateRequest(), Invalid, "PROMPT_EMPTY"),
    "longer than the context": (text_request("x" * 5_000), Invalid, "CONTEXT_LENGTH_EXCEEDED"),
    "longer than the pool": (
        text_request("x" * 100),
        grpc.StatusCode.FAILED_PRECONDITION,
        "SEQUENCE_EXCEEDS_POOL",
    ),
    "negative token count": (text_request("x", token_count_max=-1), Invalid, "FIELD_INVALID"),
    "empty stop string": (text_request("x", stop_strings=[""]), Invalid, "FIELD_INVALID"),
    "too many stop strings": (
        text_request("x", stop_strings=["y"] * 17),
        Invalid,
        "FIELD_INVALID",
    ),
    "negative top_k": (
        text_request("x", sampling=worker_pb2.SamplingOptions(top_k=-1)),
        Invalid,
        "FIELD_INVALID",
    ),
    "endless salt": (text_request("x", cache_salt="s" * 129), Invalid, "FIELD_INVALID"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_bad_prompt_is_refused_by_the_worker(raw: Stubs, worker: Client, case: str) -> None:
    """Code and reason as documented; the worker's pool holds and counts what it did before."""
    request, code, reason = PROMPTS[case]
    before = accounts_of(raw, "worker")
    with pytest.raises(grpc.RpcError) as raised:
        worker.generate(request)
    assert (code, reason) == (raised.value.code(), error_reason(raised.value))
    assert before == accounts_of(raw, "worker")


def test_a_sequence_id_twice_is_refused_by_the_worker(raw: Stubs, worker: Client) -> None:
    """The second answer of one name ends with SEQUENCE_EXISTS; the first goes on."""
    endless = {"token_count_max": 40, "ignore_end_of_sequence": True, "sequence_id": "twice"}
    first = worker.worker.Generate(text_request("abc", **endless), timeout=PROCESS_TIMEOUT_S)
    next(first)
    with pytest.raises(grpc.RpcError) as raised:
        worker.generate(text_request("abc", **endless))
    assert error_reason(raised.value) == "SEQUENCE_EXISTS"
    assert list(first)[-1].finished.generated_token_count == 40


@pytest.mark.parametrize("module", ["prefixd.controller", "prefixd.worker"])
def test_an_unknown_option_is_refused(module: str) -> None:
    """The process ends at once, with the option's name and without a traceback."""
    status, errors = ended(module, "--bogus")
    assert status == 2
    assert "--bogus" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_second_controller_cannot_take_an_address(kind: str, tmp_path: Path) -> None:
    """It ends with one line that names the address, and the first one's pool stays."""
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path / 'socket'}"
    with controller_process("--listen", listen) as first, stubs(first.address) as raw:
        Driver(raw, "pool").step(open_entry(1, OPEN_TOKENS))
        before = accounts_of(raw, "pool")
        status, errors = ended("prefixd.controller", "--listen", first.address)
        assert status != 0
        assert first.address in errors.splitlines()[-1]
        assert "Traceback" not in errors
        assert before == accounts_of(raw, "pool")


def test_a_worker_without_controller_refuses_answers(model_folder: Path, unused_port: int) -> None:
    """It starts, serves, and says what it lacks: CONTROLLER_UNAVAILABLE."""
    config = WorkerConfig(controller=f"127.0.0.1:{unused_port}", controller_wait_s=0)
    lonely = WorkerThread(config, strict_runner(model_folder, block_count=16))
    lonely.start()
    try:
        with client(lonely.address) as calls, pytest.raises(grpc.RpcError) as raised:
            calls.generate(text_request("x"))
    finally:
        lonely.stop()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error_reason(raised.value) == "CONTROLLER_UNAVAILABLE"


def test_a_model_that_the_guard_refuses_never_serves(
    raw: Stubs, driver: Driver, controller: ControllerThread, tmp_path: Path
) -> None:
    """A model whose attention is not causal: one line with the reason, and no pool is made."""
    BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, architectures=["BertLMHeadModel"],
    ).save_pretrained(tmp_path)  # fmt: skip
    before = raw.inspect.ListPools(inspect_pb2.ListPoolsRequest())
    options = ("--controller", controller.address, "--listen", "127.0.0.1:0")
    status, errors = ended("prefixd.worker", "--model", str(tmp_path), *options)
    assert status != 0
    assert errors.splitlines()[-1].startswith("prefixd worker: ")
    assert "Traceback" not in errors
    assert before == raw.inspect.ListPools(inspect_pb2.ListPoolsRequest())


def ended(module: str, *arguments: str) -> tuple[int, str]:
    """Runs a server that must end by itself; returns its exit status and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stderr
