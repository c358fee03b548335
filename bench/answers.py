"""Answers of the small real model: time to first token cold and warm, and decoding side by side."""

import asyncio
import statistics

from bench.figures import Figure
from prefixd.clients.answers import Answer, GenerateOptions, TokenPrompt
from prefixd.clients.demo import scenario
from prefixd.clients.processes import Servers, ServersConfig, servers
from prefixd.clients.worker_client import AsyncWorkerClient, WorkerClient

PAIR_COUNT = 3
"""Cold and warm answers, in turns."""
TURN_COUNT = 3
"""Single answers and batches of answers, in turns."""
CONCURRENT_COUNT = 8
GENERATED_TOKEN_COUNT = 48
PROMPT_TOKEN_COUNT = 40
BITWISE = ServersConfig(worker_arguments=("--attention-backend", "strict"))
"""How the demo runs on a CPU."""
FAST = ServersConfig(worker_arguments=("--attention-backend", "torch"))


def ignore(_: str) -> None:
    """Takes no notice of progress."""


def first_token_figures() -> list[Figure]:
    """Measures the demo's document: the first question of a tenant, then another one."""
    cold: list[float] = []
    warm: list[float] = []
    with (
        servers(BITWISE, report=ignore) as running,
        WorkerClient(running.worker_connection) as worker,
    ):
        scenario.warm_up(worker)
        for pair in range(PAIR_COUNT):
            options = GenerateOptions(token_count_max=1, cache_salt=f"tenant-{pair}")
            first, second = (
                worker.generate(scenario.prompt(question), options)
                for question in scenario.QUESTIONS[:2]
            )
            assert first.cached_token_count == 0
            assert second.cached_token_count > 0
            cold.append(first.time_to_first_token_ms)
            warm.append(second.time_to_first_token_ms)
    return [
        Figure(
            "demo document: time to first token, cached",
            statistics.median(warm),
            "ms",
            baseline="cold",
            baseline_value=statistics.median(cold),
            ratio=statistics.median(
                later / earlier for earlier, later in zip(cold, warm, strict=True)
            ),
            target=1 / 15,
        )
    ]


def decode_rate_figures() -> list[Figure]:
    """Measures the decode rate of several answers together against one alone."""
    with servers(FAST, report=ignore) as running:
        alone, together = asyncio.run(_decode_rates(running))
    return [
        Figure(
            f"decode rate of {CONCURRENT_COUNT} concurrent answers",
            statistics.median(together),
            "tokens/s",
            baseline="one answer",
            baseline_value=statistics.median(alone),
            ratio=statistics.median(
                several / one for one, several in zip(alone, together, strict=True)
            ),
            target=2.0,
            at_least=True,
        )
    ]


async def _decode_rates(running: Servers) -> tuple[list[float], list[float]]:
    alone: list[float] = []
    together: list[float] = []
    async with AsyncWorkerClient(running.worker_connection) as worker:
        await _answers(worker, first_token_id=1, count=2)
        for turn in range(TURN_COUNT):
            start = 100 * (turn + 1)
            alone.append(_rate(await _answers(worker, first_token_id=start, count=1)))
            together.append(
                _rate(await _answers(worker, first_token_id=start + 1, count=CONCURRENT_COUNT))
            )
    return alone, together


async def _answers(worker: AsyncWorkerClient, *, first_token_id: int, count: int) -> list[Answer]:
    options = GenerateOptions(token_count_max=GENERATED_TOKEN_COUNT, ignore_end_of_sequence=True)
    prompts = [
        TokenPrompt((first_token_id + number,) * PROMPT_TOKEN_COUNT) for number in range(count)
    ]
    return await asyncio.gather(*(worker.generate(prompt, options) for prompt in prompts))


def _rate(answers: list[Answer]) -> float:
    return sum(answer.decode_tokens_per_second for answer in answers)
