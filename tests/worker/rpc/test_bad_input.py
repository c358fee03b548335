"""Bad requests get their documented error, which names field and limit; nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from prefixd.v1 import inspect_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.execution import PassRunner
from prefixd.worker.limits import LIVE_SEQUENCES_MAX
from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs
from tests.support.pass_runners import GatedRunner
from tests.support.worker import (
    Client,
    collect,
    error_reason,
    strict_runner,
    text_request,
    tokens_request,
    wait_idle,
    wait_until,
    worker_thread,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def running(tiny_folder: Path) -> Iterator[tuple[Client, Stubs]]:
    """A worker with a pool of 31 blocks of 4: less than the model's context of 2,048."""
    with controller_thread() as controller, stubs(controller.address) as control:
        config = WorkerConfig(controller=controller.address, pool_name="bad")
        runner = strict_runner(tiny_folder, block_count=32)
        with worker_thread(config, runner) as (_, client):
            yield client, control


def chat(*messages: worker_pb2.ChatMessage) -> worker_pb2.Prompt:
    """A conversation as a prompt."""
    return worker_pb2.Prompt(chat=worker_pb2.ChatMessages(messages=messages))


def request(**fields: Any) -> worker_pb2.GenerateRequest:
    """A good request, with something changed."""
    return worker_pb2.GenerateRequest(**({"prompt": worker_pb2.Prompt(text="hi")} | fields))


def sampling(**options: Any) -> worker_pb2.GenerateRequest:
    """A good request with sampling options."""
    return request(sampling=worker_pb2.SamplingOptions(**options))


USER = worker_pb2.ChatMessage(role="user", content="hi")
MISFIT = worker_pb2.ChatMessage(role="user", content="hi", token_ids=[1, 999])
STRANGER = worker_pb2.ChatMessage(role="stranger", content="hi")

BAD_REQUESTS = {
    "no prompt": (worker_pb2.GenerateRequest(), INVALID, "PROMPT_EMPTY", "prompt"),
    "no text": (text_request(""), INVALID, "PROMPT_EMPTY", "prompt"),
    "no token": (tokens_request([]), INVALID, "PROMPT_EMPTY", "prompt"),
    "no message": (request(prompt=chat()), INVALID, "PROMPT_EMPTY", "prompt"),
    "token id": (
        tokens_request([1, 258]),
        INVALID,
        "TOKEN_ID_INVALID",
        "prompt.tokens.token_ids[1]",
    ),
    "message's token id": (
        request(prompt=chat(USER, MISFIT)),
        INVALID,
        "TOKEN_ID_INVALID",
        "prompt.chat.messages[1].token_ids[1]",
    ),
    "role": (request(prompt=chat(STRANGER)), INVALID, "FIELD_INVALID", "prompt.chat.messages"),
    "context": (tokens_request([1] * 2_048), INVALID, "CONTEXT_LENGTH_EXCEEDED", "prompt"),
    "answer beyond the context": (
        request(token_count_max=2_047),
        INVALID,
        "CONTEXT_LENGTH_EXCEEDED",
        "prompt",
    ),
    "pool": (tokens_request([1] * 125), PRECONDITION, "SEQUENCE_EXCEEDS_POOL", "prompt"),
    "answer beyond the pool": (
        request(token_count_max=124),
        PRECONDITION,
        "SEQUENCE_EXCEEDS_POOL",
        "prompt",
    ),
    "token count": (request(token_count_max=-1), INVALID, "FIELD_INVALID", "token_count_max"),
    "temperature below": (
        sampling(temperature=-0.5),
        INVALID,
        "FIELD_INVALID",
        "sampling.temperature",
    ),
    "temperature above": (
        sampling(temperature=101),
        INVALID,
        "FIELD_INVALID",
        "sampling.temperature",
    ),
    "temperature is no number": (
        sampling(temperature=float("nan")),
        INVALID,
        "FIELD_INVALID",
        "sampling.temperature",
    ),
    "top_k": (sampling(top_k=-1), INVALID, "FIELD_INVALID", "sampling.top_k"),
    "top_p below": (sampling(top_p=0.0), INVALID, "FIELD_INVALID", "sampling.top_p"),
    "top_p above": (sampling(top_p=1.5), INVALID, "FIELD_INVALID", "sampling.top_p"),
    "seed": (sampling(seed=-1), INVALID, "FIELD_INVALID", "sampling.seed"),
    "stop strings": (request(stop_strings=["x"] * 17), INVALID, "FIELD_INVALID", "stop_strings"),
    "empty stop string": (
        request(stop_strings=["x", ""]),
        INVALID,
        "FIELD_INVALID",
        "stop_strings[1]",
    ),
    "long stop string": (
        request(stop_strings=["x" * 257]),
        INVALID,
        "FIELD_INVALID",
        "stop_strings[0]",
    ),
    "salt": (request(cache_salt="x" * 129), INVALID, "FIELD_INVALID", "cache_salt"),
    "sequence id": (request(sequence_id="é" * 129), INVALID, "FIELD_INVALID", "sequence_id"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request_is_refused_by_name(running: tuple[Client, Stubs], case: str) -> None:
    """The code, the reason and the field are the documented ones; the pool is as before."""
    client, control = running
    bad, code, reason, field = BAD_REQUESTS[case]
    before = control.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="bad"))

    with pytest.raises(grpc.RpcError) as caught:
        client.generate(bad)

    assert caught.value.code() == code
    assert error_reason(caught.value) == reason
    assert field_of(caught.value) == field
    assert control.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="bad")) == before


FLOATS_REFUSED = {
    "temperature": (
        sampling(temperature=101.5),
        {"temperature": "101.5", "temperature_min": "0", "temperature_max": "100"},
    ),
    "no number": (
        sampling(temperature=float("nan")),
        {"temperature": "nan", "temperature_min": "0", "temperature_max": "100"},
    ),
    "top_k": (sampling(top_k=-1), {"top_k": "-1", "top_k_min": "0"}),
    "top_p": (sampling(top_p=1.5), {"top_p": "1.5", "top_p_min": "0", "top_p_max": "1"}),
    "length_penalty": (
        request(beam_search=worker_pb2.BeamSearch(beam_count=2, length_penalty=10.5)),
        {"length_penalty": "10.5", "length_penalty_min": "-10", "length_penalty_max": "10"},
    ),
}


@pytest.mark.parametrize("case", FLOATS_REFUSED)
def test_every_number_of_a_refusal_stands_in_its_metadata(
    running: tuple[Client, Stubs], case: str
) -> None:
    """The value and its bounds, whole or not."""
    client, _ = running
    bad, metadata = FLOATS_REFUSED[case]

    with pytest.raises(grpc.RpcError) as caught:
        client.generate(bad)

    status = rpc_status.from_call(caught.value)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert dict(info.metadata) == metadata


def field_of(error: grpc.RpcError) -> str:
    """The field that a failed call's BadRequest names."""
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad_request):
            (violation,) = bad_request.field_violations
            return str(violation.field)
    raise AssertionError("no BadRequest")


def test_counting_refuses_what_generating_refuses(running: tuple[Client, Stubs]) -> None:
    """CountTokens reads prompts by the same rules."""
    client, _ = running
    prompt = worker_pb2.Prompt(tokens=worker_pb2.TokenIds(token_ids=[258]))

    with pytest.raises(grpc.RpcError) as caught:
        client.worker.CountTokens(worker_pb2.CountTokensRequest(prompt=prompt))

    assert error_reason(caught.value) == "TOKEN_ID_INVALID"


def test_running_sequence_id_is_taken(running: tuple[Client, Stubs]) -> None:
    """A second answer under the name of a running one is refused; the first goes on."""
    client, _ = running
    fields = {"sequence_id": "mine", "token_count_max": 60, "ignore_end_of_sequence": True}
    first = client.worker.Generate(text_request("one", **fields))
    next(first)

    with pytest.raises(grpc.RpcError) as caught:
        client.generate(text_request("two", **fields))

    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert error_reason(caught.value) == "SEQUENCE_EXISTS"
    assert list(first)[-1].finished.generated_token_count == 60


def test_message_above_the_limit_is_refused(running: tuple[Client, Stubs]) -> None:
    """gRPC refuses a message above 64 MiB; the worker goes on."""
    client, _ = running

    with pytest.raises(grpc.RpcError) as caught:
        client.generate(text_request("x" * (65 * 1024 * 1024)))

    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.generate(text_request("ok", token_count_max=1)).text is not None


@pytest.mark.parametrize("method", ["Generate", "CountTokens"])
def test_unreadable_message_is_a_typed_error(running: tuple[Client, Stubs], method: str) -> None:
    """Bytes that are no message are the caller's fault."""
    client, _ = running
    call = client.channel.unary_stream(f"/prefixd.v1.WorkerService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff"))
    assert caught.value.code() == INVALID
    assert error_reason(caught.value) == "FIELD_INVALID"


def test_one_answer_too_many_is_refused(tiny_folder: Path, controller: ControllerThread) -> None:
    """Beyond the documented number of live answers: LIMIT_EXCEEDED; the others are not hurt."""
    gates: list[GatedRunner] = []

    def wrap(inner: PassRunner) -> PassRunner:
        gates.append(GatedRunner(inner))
        return gates[0]

    config = WorkerConfig(controller=controller.address, pool_name="full")
    runner = strict_runner(tiny_folder, block_count=32)
    with (
        worker_thread(config, runner, wrap_runner=wrap) as (_, client),
        stubs(controller.address) as control,
    ):
        gates[0].close()
        short = text_request("one of many", token_count_max=1)
        streams = [client.worker.Generate(short) for _ in range(LIVE_SEQUENCES_MAX)]
        wait_until(
            lambda: (
                (info := client.info()).running_sequence_count + info.waiting_sequence_count
                == LIVE_SEQUENCES_MAX
            )
        )

        with pytest.raises(grpc.RpcError) as caught:
            client.generate(short)
        with pytest.raises(grpc.RpcError) as unread:
            client.generate(tokens_request([999]))
        gates[0].open()

        assert error_reason(unread.value) == "LIMIT_EXCEEDED", "its prompt was read for nothing"
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_reason(caught.value) == "LIMIT_EXCEEDED"
        assert len(collect(streams[0]).token_ids) == 1
        for stream in streams[1:]:
            stream.cancel()
        assert wait_idle(control, "full").held_block_count == 0
