"""Pools of 8-bit KV behind a real worker: cached answers are uncached ones; formats are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller import ControllerThread, stubs
from tests.support.worker import (
    Client,
    collect,
    collect_samples,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)
from tests.worker.rpc.disturbances import FIELDS, tiny_config

DTYPE_NAMES = {"int8": "int8", "fp8": "float8_e4m3fn"}
PROMPT = [position * 11 % 240 for position in range(75)]


@pytest.fixture(params=sorted(DTYPE_NAMES))
def kv_dtype(request: pytest.FixtureRequest) -> str:
    """A format, as the option names it."""
    name: str = request.param
    return name


@pytest.fixture
def calls(tiny_folder: Path, kv_dtype: str, controller: ControllerThread) -> Iterator[Client]:
    """A worker with sub-block reuse and a pool of this format."""
    config = tiny_config(controller.address, sub_block_reuse=True)
    runner = strict_runner(tiny_folder, block_count=128, block_size=16, kv_dtype=kv_dtype)
    with worker_thread(config, runner) as (_, client):
        yield client


def test_warm_answer_equals_cold_answer(calls: Client) -> None:
    """Blocks from the cache and a copied partial block give what an empty cache gives."""
    calls.generate(tokens_request(PROMPT, **FIELDS))
    longer = [*PROMPT[:70], 3, 1, 4, 1, 5, 9]
    warm = calls.generate(tokens_request(longer, **FIELDS))
    cold = calls.generate(tokens_request(longer, skip_cache_read=True, **FIELDS))

    assert warm.finished.cached_token_count == 70
    assert cold.finished.cached_token_count == 0
    assert warm.token_ids == cold.token_ids


def test_answers_side_by_side_equal_answers_alone(calls: Client) -> None:
    """Prompts of one prefix together in cascades and mixed steps, and samples that copy blocks."""
    prompts = [[*PROMPT[:50], number] for number in range(4)]
    alone = [calls.generate(tokens_request(prompt, **FIELDS)).token_ids for prompt in prompts]
    streams = [
        calls.worker.Generate(tokens_request(prompt, skip_cache_read=number % 2 == 1, **FIELDS))
        for number, prompt in enumerate(prompts)
    ]
    assert alone == [collect(stream).token_ids for stream in streams]
    samples = collect_samples(
        calls.worker.Generate(tokens_request(prompts[0], sample_count=3, **FIELDS))
    )
    assert [alone[0]] * 3 == [sample.token_ids for sample in samples]


def test_clients_see_the_format(calls: Client, controller: ControllerThread, kv_dtype: str) -> None:
    """The worker tells it with a token's memory, the pool with its layout."""
    info = calls.info()
    assert info.dtype == "float32"
    assert DTYPE_NAMES[kv_dtype] == info.kv_dtype
    with stubs(controller.address) as control:
        pool = wait_idle(control, "tiny")
    expected = f"{DTYPE_NAMES[kv_dtype]} slot-major, a scale per token and head"
    assert expected == pool.kv_format


def test_a_pool_of_another_format_begins_empty(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """A name that is registered anew with another format finds none of the old blocks."""
    token_byte_counts = {}
    for kv_dtype in ("auto", "int8"):
        runner = strict_runner(tiny_folder, block_count=64, kv_dtype=kv_dtype)
        with worker_thread(tiny_config(controller.address), runner) as (_, client):
            answer = client.generate(tokens_request(PROMPT, **FIELDS))
            assert answer.finished.cached_token_count == 0
            token_byte_counts[kv_dtype] = client.info().token_byte_count
    assert token_byte_counts["int8"] < token_byte_counts["auto"] / 2
