"""Samples, beams, log probabilities, guesses, adapters and reloads, as clients ask for them."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prefixd.clients import (
    AsyncWorkerClient,
    BeamSearch,
    CallRefused,
    Connection,
    GenerateOptions,
    LoraAdapter,
    WorkerClient,
)
from prefixd.clients.cli.main import run
from prefixd.worker.config import WorkerConfig
from prefixd.worker.lora import LoraIdentity
from tests.support.adapters import write_adapter
from tests.support.controller import controller_thread
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import strict_runner, worker_thread

FEW = GenerateOptions(token_count_max=8, ignore_end_of_sequence=True)
DRAWN = replace(FEW, temperature=1.5, seed=7)
PROMPT = "Say something."


@dataclass(frozen=True)
class Place:
    """Where a worker listens, and what it read."""

    worker_address: str
    model_folder: Path
    adapter_folder: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A worker with an adapter called poet."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), folder, seed=1)
    loras = (LoraIdentity("poet", str(adapter), "1"),)
    runner = strict_runner(folder, block_count=256, loras=loras)
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="tiny")
        with worker_thread(config, runner) as (worker, _):
            yield Place(worker.address, folder, adapter)


@pytest.fixture
def client(place: Place) -> Iterator[WorkerClient]:
    """A client of the worker."""
    with WorkerClient(Connection(place.worker_address)) as opened:
        yield opened


def test_samples_come_in_order(client: WorkerClient) -> None:
    """Sample i is the answer under the seed plus i."""
    answers = client.generate_all(PROMPT, replace(DRAWN, sample_count=3))
    singles = [client.generate(PROMPT, replace(DRAWN, seed=7 + index)) for index in range(3)]
    assert [answer.token_ids for answer in answers] == [single.token_ids for single in singles]
    assert [answer.sample_index for answer in answers] == [0, 1, 2]


def test_beams_come_with_their_scores(client: WorkerClient) -> None:
    """The best first; a drawn answer has no score."""
    options = replace(FEW, sample_count=2, beam_search=BeamSearch(3, length_penalty=0.5))
    best, second = client.generate_all(PROMPT, options)
    assert best.score is not None
    assert second.score is not None
    assert best.score >= second.score
    assert client.generate(PROMPT, FEW).score is None


def test_logprobs_of_the_prompt_come_with_the_answer(client: WorkerClient) -> None:
    """One less than the prompt has tokens; none where nobody asked."""
    answer = client.generate(PROMPT, replace(FEW, prompt_logprobs=True))
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == answer.prompt_token_count - 1
    assert max(answer.prompt_logprobs) < 0
    assert client.generate(PROMPT, FEW).prompt_logprobs is None


def test_guesses_are_counted(client: WorkerClient) -> None:
    """The answer stays as it was."""
    prompt = "abcabcabcabcabc"
    guessed = client.generate(prompt, replace(FEW, draft_token_count_max=3))
    assert guessed.token_ids == client.generate(prompt, FEW).token_ids
    assert 0 <= guessed.accepted_draft_token_count <= guessed.draft_token_count


def test_an_adapter_answers_differently(client: WorkerClient, place: Place) -> None:
    """The worker tells which there are."""
    plain, poetic = (client.generate(PROMPT, replace(FEW, lora_name=n)) for n in ("", "poet"))
    assert plain.token_ids != poetic.token_ids
    poet = LoraAdapter("poet", str(place.adapter_folder), "1")
    assert client.worker_info().lora_adapters == (poet,)


def test_reload_tells_what_went(client: WorkerClient, place: Place) -> None:
    """The version is the worker's from then on; a bad folder is refused with its reason."""
    client.generate(PROMPT, FEW)
    before = client.worker_info().model_version
    reloaded = client.reload_weights(f"{before}+")
    assert reloaded.previous_model_version == before
    assert reloaded.dropped_block_count > 0
    assert client.worker_info().model_version == f"{before}+"
    with pytest.raises(CallRefused) as caught:
        client.reload_weights("other", folder=str(place.adapter_folder))
    assert caught.value.reason == "WEIGHTS_UNUSABLE"


def test_asyncio_twin_does_the_same(client: WorkerClient, place: Place) -> None:
    """Samples and reloads."""

    async def everything() -> tuple[list[tuple[int, ...]], str]:
        async with AsyncWorkerClient(Connection(place.worker_address)) as twin:
            answers = await twin.generate_all(PROMPT, replace(DRAWN, sample_count=2))
            await twin.reload_weights("async")
            return [answer.token_ids for answer in answers], (
                await twin.worker_info()
            ).model_version

    token_ids, version = asyncio.run(everything())
    answers = client.generate_all(PROMPT, replace(DRAWN, sample_count=2))
    assert token_ids == [answer.token_ids for answer in answers]
    assert version == "async"


def test_command_line_prints_every_sample(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """With an index and, for beams, a score; in JSON a list."""
    common = ["generate", PROMPT, "-n", "6", "--worker", place.worker_address, "--samples", "2"]
    assert run([*common, "--beams", "3", "--length-penalty", "0.5"]) == 0
    printed = capsys.readouterr()
    assert "[0] (score -" in printed.out
    assert "[1] (score -" in printed.out
    assert printed.err.count("prompt tokens") == 1
    assert printed.err.endswith("12 tokens in 2 answers\n")
    assert run([*common, "--json", "--prompt-logprobs", "--draft-token-count-max", "2"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["sample_index"] for answer in answers] == [0, 1]
    assert len(answers[0]["prompt_logprobs"]) == len(PROMPT) - 1


def test_command_line_reloads(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """As a line and as JSON; an adapter is chosen by name."""
    worker = ["--worker", place.worker_address]
    assert run(["reload", "v7", "--folder", str(place.model_folder), *worker]) == 0
    assert capsys.readouterr().out.startswith("runs v7; dropped ")
    assert run(["reload", "v8", "--json", *worker]) == 0
    assert json.loads(capsys.readouterr().out)["previous_model_version"] == "v7"
    assert run(["generate", PROMPT, "-n", "2", "--lora", "nobody", *worker]) == 1
    assert "FIELD_INVALID" in capsys.readouterr().err
