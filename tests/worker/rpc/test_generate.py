"""Answers end to end: a tiny model on the strict backend, a real controller, gRPC between all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.v1 import admin_pb2, worker_pb2
from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.worker import (
    Client,
    collect,
    strict_runner,
    text_request,
    tokens_request,
    wait_idle,
    worker_thread,
)

BLOCK_SIZE = 4
PROMPT = tuple(range(10, 51))


@pytest.fixture(scope="module")
def calls(tiny_folder: Path) -> Iterator[Client]:
    """A worker with a roomy pool, shared by tests that use prompts of their own."""
    with controller_thread() as controller:
        config = WorkerConfig(
            controller=controller.address,
            pool_name="tiny",
            limits=SchedulerLimits(chunk_token_count_max=16, token_budget=128),
        )
        runner = strict_runner(tiny_folder, block_count=512, block_size=BLOCK_SIZE)
        with worker_thread(config, runner) as (_, client):
            yield client


def chat_request(*messages: worker_pb2.ChatMessage, **fields: object) -> worker_pb2.GenerateRequest:
    """A request whose prompt is a conversation."""
    prompt = worker_pb2.Prompt(chat=worker_pb2.ChatMessages(messages=messages))
    return worker_pb2.GenerateRequest(prompt=prompt, **fields)


def test_answer_tells_what_it_cost(calls: Client) -> None:
    """Counts, blocks, times and the finish reason come with the last part."""
    answer = calls.generate(tokens_request(PROMPT, token_count_max=8, ignore_end_of_sequence=True))

    finished = answer.finished
    assert len(answer.token_ids) == finished.generated_token_count == 8
    assert finished.finish_reason == worker_pb2.FINISH_REASON_TOKEN_COUNT_MAX
    assert finished.prompt_token_count == answer.started.prompt_token_count == len(PROMPT)
    assert tuple(answer.started.prompt_token_ids) == PROMPT
    # The last token is never computed: 41 + 7 positions.
    assert finished.block_count == 12
    assert finished.time_to_first_token.ToNanoseconds() > 0
    assert finished.decode_tokens_per_second > 0


def test_cached_answer_equals_the_uncached_one(calls: Client) -> None:
    """The second answer reuses whole blocks of all but the last token, and is the same."""
    prompt = [3, *PROMPT]
    fields = {"token_count_max": 12, "ignore_end_of_sequence": True}

    cold = calls.generate(tokens_request(prompt, **fields))
    warm = calls.generate(tokens_request(prompt, **fields))
    apart = calls.generate(tokens_request(prompt, skip_cache_read=True, **fields))

    assert cold.finished.cached_token_count == 0
    assert warm.finished.cached_token_count == warm.started.cached_token_count == 40
    assert apart.finished.cached_token_count == 0
    assert cold.token_ids == warm.token_ids == apart.token_ids
    assert cold.text == warm.text == apart.text


def test_salts_keep_tenants_apart(calls: Client) -> None:
    """The same prompt under another salt finds nothing; under the same salt it does."""
    prompt = [4, *PROMPT]

    cached = [
        calls.generate(
            tokens_request(prompt, token_count_max=1, cache_salt=salt)
        ).finished.cached_token_count
        for salt in ("", "a", "b", "a")
    ]

    assert cached == [0, 0, 0, 40]


def test_text_comes_in_whole_characters_and_adds_up(calls: Client) -> None:
    """Random bytes: no chunk splits a character, and the text is that of all tokens."""
    answer = calls.generate(text_request("bytes", token_count_max=120, ignore_end_of_sequence=True))
    prompt = worker_pb2.Prompt(text=answer.text)
    counted = calls.worker.CountTokens(worker_pb2.CountTokensRequest(prompt=prompt))

    assert len(answer.token_ids) == 120
    assert counted.token_count == len(answer.text.encode())
    # Valid characters come whole; what is no character comes as one replacement for each.
    assert all(chunk.encode().decode() == chunk for chunk in answer.texts)


def test_stop_string_ends_the_answer_before_it(calls: Client) -> None:
    """A stop string of several tokens, found in an answer known from before."""
    fields = {"token_count_max": 60, "ignore_end_of_sequence": True}
    whole = calls.generate(text_request("stop here", **fields))
    stop = whole.text[20:23]
    expected = whole.text[: whole.text.index(stop)]

    stopped = calls.generate(text_request("stop here", stop_strings=[stop, "\0never"], **fields))

    assert stopped.text == expected
    assert stopped.finished.finish_reason == worker_pb2.FINISH_REASON_STOP_STRING
    assert stopped.finished.stop_string == stop
    assert stopped.finished.generated_token_count < 60


def test_end_of_sequence_token_ends_the_answer(calls: Client) -> None:
    """The end token is no part of the answer; with ignore_end_of_sequence it is a token."""
    end_token_id = 257
    for start in range(200):
        # Sampled at a high temperature, an end token comes soon.
        sampling = worker_pb2.SamplingOptions(temperature=100.0, seed=start)
        answer = calls.generate(text_request("end", token_count_max=40, sampling=sampling))
        assert end_token_id not in answer.token_ids
        if answer.finished.finish_reason == worker_pb2.FINISH_REASON_END_OF_SEQUENCE:
            break
    else:
        raise AssertionError("no answer ended by itself")
    longer = calls.generate(
        text_request("end", token_count_max=40, sampling=sampling, ignore_end_of_sequence=True)
    )

    count = answer.finished.generated_token_count
    assert longer.token_ids[:count] == answer.token_ids
    assert longer.token_ids[count] == end_token_id


def test_same_seed_gives_the_same_answer(calls: Client) -> None:
    """Drawn tokens depend on the seed, and on nothing that runs beside."""
    sampling = worker_pb2.SamplingOptions(temperature=1.5, top_k=50, top_p=0.95, seed=11)
    other = worker_pb2.SamplingOptions(temperature=1.5, top_k=50, top_p=0.95, seed=12)
    fields = {"token_count_max": 24, "ignore_end_of_sequence": True}

    streams = [
        calls.worker.Generate(text_request("dice", sampling=options, **fields))
        for options in (sampling, other, sampling)
    ]
    first, second, third = (collect(stream).token_ids for stream in streams)

    assert first == third
    assert first != second


def test_second_turn_reuses_the_first_answer(calls: Client) -> None:
    """With the answer's token ids the conversation's prompt begins exactly as it was computed."""
    question = worker_pb2.ChatMessage(role="user", content="How far is it?")
    fields = {"token_count_max": 21, "ignore_end_of_sequence": True}
    first = calls.generate(chat_request(question, **fields))
    earlier = [*first.started.prompt_token_ids, *first.token_ids]

    second = calls.generate(
        chat_request(
            question,
            worker_pb2.ChatMessage(role="assistant", content=first.text, token_ids=first.token_ids),
            worker_pb2.ChatMessage(role="user", content="And back?"),
            **fields,
        )
    )

    assert list(second.started.prompt_token_ids[: len(earlier)]) == earlier
    # The last token of an answer is never computed, so one less than all are written.
    expected = (len(earlier) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.started.cached_token_count == expected


def test_default_length_ends_where_the_context_or_the_pool_ends(calls: Client) -> None:
    """Without a number the answer ends where there is no more room, and says so."""
    slot_count = (512 - 1) * BLOCK_SIZE
    assert slot_count < calls.info().context_token_count_max

    prompt = [5] * (slot_count - 2)
    answer = calls.generate(tokens_request(prompt, ignore_end_of_sequence=True))

    # The last token needs no slot.
    assert answer.finished.generated_token_count == 3
    assert answer.finished.finish_reason == worker_pb2.FINISH_REASON_CONTEXT_LENGTH


def test_worker_describes_itself(calls: Client) -> None:
    """Model, pool, limits and counters."""
    calls.generate(text_request("info", token_count_max=2))
    info = calls.info()

    assert info.pool_name == "tiny"
    assert info.attention_backend == "strict"
    assert (info.block_count, info.block_size) == (512, BLOCK_SIZE)
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.vocabulary_size == 258
    assert info.epoch > 0
    assert info.prefill_token_count > 0
    assert info.decode_token_count > 0
    assert info.running_sequence_count == info.waiting_sequence_count == 0


def test_nothing_is_held_and_everything_confirmed_afterwards(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """An idle worker holds no block and leaves no step open, so the pool can be flushed."""
    config = WorkerConfig(controller=controller.address, pool_name="idle")
    runner = strict_runner(tiny_folder, block_count=64)
    with worker_thread(config, runner) as (_, client), stubs(controller.address) as control:
        client.generate(tokens_request(PROMPT, token_count_max=4, ignore_end_of_sequence=True))
        wait_idle(control, "idle")
        flushed = control.admin.FlushPool(admin_pb2.FlushPoolRequest(pool_name="idle"))

        # 41 prompt tokens and 3 computed ones are 11 full blocks.
        assert flushed.dropped_block_count == 11
        again = client.generate(tokens_request(PROMPT, token_count_max=1))
        assert again.finished.cached_token_count == 0
