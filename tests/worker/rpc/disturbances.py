"""What the tests of faults share: prompts, a worker's settings, the answers to all prompts."""

from __future__ import annotations

from typing import Any

from prefixd.worker.config import WorkerConfig
from prefixd.worker.limits import SchedulerLimits
from tests.support.worker import Client, collect, tokens_request

LIMITS = SchedulerLimits(chunk_token_count_max=16, token_budget=80)
PROMPTS = tuple([seed * 7 % 200 + i for i in range(20 + seed)] for seed in range(5))
FIELDS: dict[str, Any] = {"token_count_max": 24, "ignore_end_of_sequence": True}
LONG: dict[str, Any] = {"token_count_max": 1_900, "ignore_end_of_sequence": True}


def tiny_config(controller_address: str, **changes: Any) -> WorkerConfig:
    """A worker with a pool called tiny."""
    fields: dict[str, Any] = {"controller": controller_address, "pool_name": "tiny"}
    return WorkerConfig(**(fields | {"limits": LIMITS} | changes))


def answers_to_all(client: Client) -> list[tuple[int, ...]]:
    """Asks all prompts at once."""
    streams = [client.worker.Generate(tokens_request(p, **FIELDS), timeout=90) for p in PROMPTS]
    return [collect(stream).token_ids for stream in streams]
