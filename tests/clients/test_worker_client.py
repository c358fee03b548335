"""The worker's typed clients and commands against a real worker with a tiny random model."""

import asyncio
import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from prefixd.clients import (
    Answer,
    AnswerIncomplete,
    AsyncWorkerClient,
    CallRefused,
    ChatPrompt,
    Chunk,
    Connection,
    ControllerClient,
    Conversation,
    FinishReason,
    GenerateOptions,
    Message,
    TokenPrompt,
    WorkerClient,
)
from prefixd.clients.cli.answer import TYPE_HERE
from prefixd.clients.cli.main import run
from prefixd.clients.worker_calls import AnswerReader
from prefixd.worker.config import WorkerConfig
from tests.support.controller import controller_thread
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import strict_runner, worker_thread

POOL_NAME = "tiny"
BLOCK_SIZE = 4
FEW = GenerateOptions(token_count_max=12, ignore_end_of_sequence=True)
CANCEL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Place:
    """Where a controller and its worker listen."""

    controller_address: str
    worker_address: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A controller and a worker, in process."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    runner = strict_runner(folder, block_count=256, block_size=BLOCK_SIZE)
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name=POOL_NAME)
        with worker_thread(config, runner) as (worker, _):
            yield Place(controller.address, worker.address)


@pytest.fixture
def client(place: Place) -> Iterator[WorkerClient]:
    """A client of the worker."""
    with WorkerClient(Connection(place.worker_address)) as opened:
        yield opened


def test_generate_returns_the_whole_answer(client: WorkerClient) -> None:
    """An answer has its text, its tokens and what it cost."""
    answer = client.generate("Say something.", FEW)
    assert answer.finish_reason is FinishReason.TOKEN_COUNT_MAX
    assert answer.generated_token_count == len(answer.token_ids) == 12
    assert answer.prompt_token_count == len("Say something.")
    assert answer.block_count > 0
    assert answer.time_to_first_token_ms > 0


def test_stream_is_the_answer_in_parts(client: WorkerClient) -> None:
    """The chunks' texts and tokens are those of the complete answer, in order."""
    with client.stream("Tell me more.", FEW) as stream:
        started = stream.started()
        chunks: list[Chunk] = list(stream)
        answer = stream.answer()
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert answer.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert started.sequence_id == answer.sequence_id
    assert started.prompt_token_count == len(started.prompt_token_ids)


def test_a_second_prompt_finds_the_first_ones_blocks(client: WorkerClient) -> None:
    """Cached tokens are reported in whole blocks; the same answer comes without the cache."""
    prompt = "The long beginning that both have in common. One."
    client.generate(prompt, FEW)
    again = client.generate(prompt, FEW)
    assert again.cached_token_count == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    without = client.generate(prompt, replace(FEW, skip_cache_read=True))
    assert without.cached_token_count == 0
    assert without.token_ids == again.token_ids


def test_options_reach_the_worker(client: WorkerClient, place: Place) -> None:
    """A sequence id of one's own is what the controller shows while the answer runs."""
    options = GenerateOptions(
        token_count_max=1_000, ignore_end_of_sequence=True, sequence_id="mine", cache_salt="salt"
    )
    with (
        ControllerClient(Connection(place.controller_address)) as controller,
        client.stream("Go on and on.", options) as stream,
    ):
        stream.started()
        found = controller.sequence(pool_name=POOL_NAME, sequence_id="mine")
    assert found.sequence.identity.cache_salt == "salt"


def test_leaving_a_stream_early_closes_its_sequence(client: WorkerClient, place: Place) -> None:
    """The end of the `with` block cancels the call, and nothing is held any more."""
    options = GenerateOptions(token_count_max=1_000, ignore_end_of_sequence=True)
    with ControllerClient(Connection(place.controller_address)) as controller:
        with client.stream("Never mind.", options) as stream:
            stream.started()
            assert controller.pool(POOL_NAME).held_block_count > 0
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        while controller.pool(POOL_NAME).held_block_count:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_chat_finds_all_earlier_turns_in_the_cache(client: WorkerClient) -> None:
    """Turn 2 sends turn 1's answer as the tokens that were generated, so its blocks are reused."""
    conversation = Conversation(system="Be brief.")
    first = client.chat(conversation, "Who are you?", FEW)
    second = client.chat(conversation, "And why?", FEW)
    reusable = first.prompt_token_count + first.generated_token_count - 1
    assert second.cached_token_count >= reusable // BLOCK_SIZE * BLOCK_SIZE
    roles = [message.role for message in conversation.messages]
    assert ["system", "user", "assistant", "user", "assistant"] == roles
    assert conversation.messages[2].token_ids == first.token_ids


def test_a_failed_turn_leaves_the_conversation_as_it_was(client: WorkerClient) -> None:
    """A refused message can be typed again."""
    conversation = Conversation()
    client.chat(conversation, "Hello", FEW)
    before = conversation.messages
    with pytest.raises(CallRefused):
        client.chat(conversation, "x" * 5_000, FEW)
    assert before == conversation.messages


def test_count_tokens_takes_every_form_of_a_prompt(client: WorkerClient) -> None:
    """Text, chat and token ids are tokenized as an answer would."""
    assert client.count_tokens("four").token_count == 4
    assert client.count_tokens(TokenPrompt((1, 2, 3))).token_ids == (1, 2, 3)
    chat = client.count_tokens(ChatPrompt((Message("user", "four"),)))
    assert chat.token_count > 4


def test_worker_info_describes_worker_and_pool(client: WorkerClient, place: Place) -> None:
    """The worker says where its controller is and which pool it drives."""
    info = client.worker_info()
    assert (info.pool_name, info.controller_address) == (POOL_NAME, place.controller_address)
    assert (info.block_size, info.attention_backend) == (BLOCK_SIZE, "strict")
    assert info.epoch > 0


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        (TokenPrompt(()), FEW, "PROMPT_EMPTY"),
        (TokenPrompt((70_000,)), FEW, "TOKEN_ID_INVALID"),
        ("x" * 5_000, FEW, "CONTEXT_LENGTH_EXCEEDED"),
        ("x", GenerateOptions(temperature=-1), "FIELD_INVALID"),
        ("x", GenerateOptions(top_p=0), "FIELD_INVALID"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_reason(
    client: WorkerClient, prompt: str | TokenPrompt, options: GenerateOptions, reason: str
) -> None:
    """A refusal in a stream is the same typed error as in a unary call."""
    with pytest.raises(CallRefused) as raised:
        client.generate(prompt, options)
    assert raised.value.reason == reason


def test_the_asyncio_client_answers_the_same(place: Place, client: WorkerClient) -> None:
    """Streaming, whole answers, chat, counts and the description agree with the other client."""

    async def everything() -> tuple[str, Answer, Answer, int, str]:
        async with AsyncWorkerClient(Connection(place.worker_address)) as twin:
            async with twin.stream("Say something.", FEW) as stream:
                await stream.started()
                text = "".join([chunk.text async for chunk in stream])
                streamed = await stream.answer()
            assert text == streamed.text
            chatted = await twin.chat(Conversation(), "Who are you?", FEW)
            count = (await twin.count_tokens("four")).token_count
            return text, streamed, chatted, count, (await twin.worker_info()).pool_name

    text, streamed, chatted, count, pool_name = asyncio.run(everything())
    answer = client.generate("Say something.", FEW)
    assert (text, streamed.token_ids) == (answer.text, answer.token_ids)
    assert chatted.token_ids == client.chat(Conversation(), "Who are you?", FEW).token_ids
    assert (count, pool_name) == (4, POOL_NAME)


def test_a_stream_without_its_end_is_no_answer() -> None:
    """What a broken stream delivered is never taken for a whole answer."""
    with pytest.raises(AnswerIncomplete):
        AnswerReader().complete()


def test_generate_prints_the_answer_and_its_cost(
    place: Place, client: WorkerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text goes to standard output, its cost to standard error."""
    arguments = ("generate", "Say something.", "-n", "12", "--worker", place.worker_address)
    assert run(arguments) == 0
    output = capsys.readouterr()
    answer = client.generate("Say something.", GenerateOptions(token_count_max=12))
    assert output.out == answer.text + "\n"
    assert "prompt tokens" in output.err


def test_generate_json_is_the_answer(
    place: Place, client: WorkerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys are the answer's fields."""
    arguments = ("generate", "Say something.", "-n", "5", "--json")
    assert run([*arguments, "--worker", place.worker_address]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_token_count"] == len("Say something.")
    assert set(answer) == set(Answer.__dataclass_fields__)


def test_chat_reads_messages_from_a_pipe(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is a turn; the second finds the first in the cache."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Who was it that rang?\n\nAnd why?\n"))
    monkeypatch.setenv("PREFIXD_WORKER", place.worker_address)
    assert run(["chat", "--json", "-n", "8"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    reusable = first["prompt_token_count"] + first["generated_token_count"] - 1
    assert second["cached_token_count"] >= reusable // BLOCK_SIZE * BLOCK_SIZE


def test_chat_talks_with_a_terminal(place: Place) -> None:
    """A person gets a mark to type at; a refused message is told and the talk goes on (Ctrl-D)."""
    controlling, terminal = pty.openpty()
    command = [sys.executable, "-m", "prefixd.clients.cli.main", "chat", "-n", "4"]
    with subprocess.Popen(
        [*command, "--worker", place.worker_address],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(terminal)
        os.write(controlling, b"Hello\n" + b"y" * 3_000 + b"\n\x04")
        out, errors = process.communicate(timeout=60)
        os.close(controlling)
    assert process.returncode == 0
    assert out.count(TYPE_HERE) == 3
    assert "first token after" in errors
    assert "prefixd: CONTEXT_LENGTH_EXCEEDED: " in errors


def test_info_worker_prints_the_worker(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker's description as rows."""
    assert run(["info", "worker", "--worker", place.worker_address]) == 0
    assert "attention backend" in capsys.readouterr().out


def test_a_refused_prompt_is_one_line(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker's reason stands at the front of the line."""
    arguments = ["generate", "x" * 5_000, "--worker", place.worker_address]
    assert run(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("prefixd: CONTEXT_LENGTH_EXCEEDED: ")


def test_a_stopped_answer_goes_on_without_its_stop_string(client: WorkerClient) -> None:
    """The stop string's tokens are cut off the text, so the next turn sends the text instead."""
    whole = client.generate("Say something.", FEW)
    stop = whole.text[4:6]
    answer = client.generate("Say something.", replace(FEW, stop_strings=(stop,)))
    assert answer.finish_reason is FinishReason.STOP_STRING
    assert answer.stop_string == stop
    assert stop not in answer.message.content
    assert answer.message.token_ids == ()
