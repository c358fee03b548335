"""Beam search, compared with that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from prefixd.v1 import worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.models import eager_folder
from tests.support.pass_runners import FaultyRunner, Wrapping
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import (
    Client,
    Generated,
    collect_samples,
    error_reason,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
END_TOKEN_ID = 257
PROMPTS = tuple(
    tuple((seed * 17 + position * 23) % 250 for position in range(21 + seed)) for seed in range(3)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its answers now and then."""
    folder = write_tiny_model(tmp_path_factory.mktemp("ending"), seed=3, initializer_range=0.1)
    network = eager_folder(folder)
    with torch.no_grad():
        head = network.lm_head.weight
        head[END_TOKEN_ID] = head[82] + head[49]  # likely where two likely tokens are
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def eager(folder: Path) -> Any:
    """The same model as transformers runs it."""
    return eager_folder(folder)


@pytest.fixture(scope="module")
def calls(folder: Path) -> Iterator[Client]:
    """A worker with a roomy pool."""
    with controller_thread() as controller:
        config = WorkerConfig(controller=controller.address, pool_name="roomy", limits=LIMITS)
        with worker_thread(config, strict_runner(folder, block_count=512)) as (_, client):
            yield client


def beam_request(
    prompt: tuple[int, ...], beam_count: int = 4, length_penalty: float | None = None, **fields: Any
) -> worker_pb2.GenerateRequest:
    """Asks for all hypotheses of a search."""
    search = worker_pb2.BeamSearch(beam_count=beam_count, length_penalty=length_penalty)
    merged = {"sample_count": beam_count, "token_count_max": 18, **fields}
    return tokens_request(prompt, beam_search=search, **merged)


def search(client: Client, request: worker_pb2.GenerateRequest) -> list[Generated]:
    """The hypotheses, best first."""
    return collect_samples(client.worker.Generate(request, timeout=90))


def expected(
    network: Any,
    prompt: tuple[int, ...],
    *,
    beam_count: int,
    length_penalty: float,
    end_token_id: int | None,
    token_count_max: int = 18,
) -> list[tuple[tuple[int, ...], float]]:
    """What transformers finds: tokens without the end token and what follows, and scores."""
    output = network.generate(
        torch.tensor([prompt]),
        # It would take token 0 for padding.
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        num_beams=beam_count,
        num_return_sequences=beam_count,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=False,
        max_new_tokens=token_count_max,
        eos_token_id=end_token_id,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    hypotheses = []
    for row, score in zip(output.sequences, output.sequences_scores, strict=True):
        token_ids = row[len(prompt) :].tolist()
        if end_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(end_token_id)]
        hypotheses.append((tuple(token_ids), float(score)))
    return hypotheses


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize(("beam_count", "length_penalty"), [(2, 1.0), (4, 1.0), (5, -0.5)])
def test_hypotheses_are_those_of_transformers(
    calls: Client, eager: Any, prompt: tuple[int, ...], beam_count: int, length_penalty: float
) -> None:
    """All of them, in order, with their scores to 1e-4; some end with the end token."""
    found = search(calls, beam_request(prompt, beam_count, length_penalty))
    wanted = expected(
        eager,
        prompt,
        beam_count=beam_count,
        length_penalty=length_penalty,
        end_token_id=END_TOKEN_ID,
    )

    assert [answer.token_ids for answer in found] == [token_ids for token_ids, _ in wanted]
    assert [a.finished.score for a in found] == pytest.approx([s for _, s in wanted], abs=1e-4)


def test_length_penalty_is_one_where_none_is_given(calls: Client, eager: Any) -> None:
    """As in transformers; without end token all hypotheses have full length."""
    found = search(calls, beam_request(PROMPTS[0], ignore_end_of_sequence=True))
    wanted = expected(eager, PROMPTS[0], beam_count=4, length_penalty=1.0, end_token_id=None)

    assert [answer.token_ids for answer in found] == [token_ids for token_ids, _ in wanted]
    assert {len(answer.token_ids) for answer in found} == {18}


def test_some_hypothesis_ends_by_itself(calls: Client) -> None:
    """So the comparison covers ends, with their reason."""
    reasons = {
        answer.finished.finish_reason
        for prompt in PROMPTS
        for answer in search(calls, beam_request(prompt, 5, -0.5))
    }
    assert worker_pb2.FINISH_REASON_END_OF_SEQUENCE in reasons


def test_only_the_wanted_hypotheses_are_sent(calls: Client) -> None:
    """The best ones; each with its text."""
    every = search(calls, beam_request(PROMPTS[1]))
    best = search(calls, beam_request(PROMPTS[1], sample_count=1))

    assert [answer.token_ids for answer in best] == [every[0].token_ids]
    assert best[0].text == every[0].text != ""


def test_s16_prompt_is_computed_once_for_all_beams(calls: Client) -> None:
    """S16: beams share the prompt's blocks; each token of a beam is computed once."""
    prompt = (9, *PROMPTS[2])
    before = calls.info()
    search(calls, beam_request(prompt, ignore_end_of_sequence=True))
    after = calls.info()

    assert after.prefill_token_count - before.prefill_token_count == len(prompt)
    assert after.decode_token_count - before.decode_token_count == 4 * 17


def test_s16_beams_stand_preemption_failed_passes_and_each_other(
    folder: Path, controller: ControllerThread, calls: Client
) -> None:
    """S16: three searches in a pool for three beams end, and find what they find alone."""
    requests = [beam_request(prompt, ignore_end_of_sequence=True) for prompt in PROMPTS]
    alone = [[answer.token_ids for answer in search(calls, request)] for request in requests]
    wrapping = Wrapping(lambda inner: FaultyRunner(inner, lambda number: number % 9 == 0))
    config = WorkerConfig(controller=controller.address, pool_name="tight", limits=LIMITS)
    runner = strict_runner(folder, block_count=26)
    with (
        worker_thread(config, runner, wrap_runner=wrapping) as (_, client),
        stubs(controller.address) as control,
    ):
        streams = [client.worker.Generate(request, timeout=90) for request in requests]
        found = [[a.token_ids for a in collect_samples(stream)] for stream in streams]
        info = client.info()
        pool = wait_idle(control, "tight")

    assert found == alone
    assert info.preemption_count > 0
    assert pool.held_block_count == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_count": 1, "sample_count": 1}, "beam_search.beam_count"),
        ({"beam_count": 33, "sample_count": 1}, "beam_search.beam_count"),
        ({"sample_count": 5}, "sample_count"),
        ({"length_penalty": float("nan")}, "beam_search.length_penalty"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"draft_token_count_max": 2}, "draft_token_count_max"),
        ({"sampling": worker_pb2.SamplingOptions(temperature=1)}, "sampling.temperature"),
    ],
)
def test_bad_searches_are_refused(calls: Client, fields: dict[str, Any], field: str) -> None:
    """Each with the name of its field."""
    with pytest.raises(grpc.RpcError) as caught:
        search(calls, beam_request(PROMPTS[0], **fields))
    assert error_reason(caught.value) == "FIELD_INVALID"
    assert field.rpartition(".")[2] in caught.value.details()
