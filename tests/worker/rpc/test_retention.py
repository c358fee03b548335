"""What clients say about later use of an answer's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.v1 import cache_pb2, inspect_pb2
from prefixd.worker.config import WorkerConfig
from tests.support.controller import ControllerThread, stubs
from tests.support.worker import (
    collect_samples,
    error_reason,
    strict_runner,
    tokens_request,
    wait_idle,
    worker_thread,
)

FIELDS: dict[str, Any] = {"token_count_max": 2, "ignore_end_of_sequence": True}
OVER = cache_pb2.RetentionHint(continuation=cache_pb2.CONTINUATION_OVER)
BLOCKS_PER_PROMPT = 3
BLOCK_SIZE = 16


def prompt(seed: int) -> tuple[int, ...]:
    """A prompt of three blocks and a bit that shares nothing with another seed's."""
    return tuple(
        (position * 7 + seed) % 250 for position in range(BLOCKS_PER_PROMPT * BLOCK_SIZE + 1)
    )


def test_s20_a_hint_given_to_generate_decides_what_is_given_up_first(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S20: the answer that came last goes first, for its conversation is over; samples, too."""
    config = WorkerConfig(
        controller=controller.address, pool_name="hinted", eviction_policy="retention"
    )
    runner = strict_runner(tiny_folder, block_count=64, block_size=BLOCK_SIZE)
    with (
        stubs(controller.address) as control,
        worker_thread(config, runner) as (_, client),
    ):
        get = inspect_pb2.GetPoolRequest(pool_name="hinted")
        assert control.inspect.GetPool(get).pool.eviction_policy == "retention"
        client.generate(tokens_request(prompt(1), **FIELDS))
        wait_idle(control, "hinted")
        request = tokens_request(prompt(2), retention_hint=OVER, sample_count=3, **FIELDS)
        collect_samples(client.worker.Generate(request, timeout=60))
        pool = wait_idle(control, "hinted")
        listing = inspect_pb2.ListFreeBlocksRequest(pool_name="hinted")
        order = list(control.inspect.ListFreeBlocks(listing).block_ids)
        evictable = order[pool.free_block_count :]
        assert len(evictable) == 2 * BLOCKS_PER_PROMPT
        # The first prompt has the pool's first blocks.
        assert sorted(evictable[BLOCKS_PER_PROMPT:]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"priority": 8}, "retention_hint.priority"),
        ({"priority": -1}, "retention_hint.priority"),
        ({"duration_ms": -1}, "retention_hint.duration_ms"),
        ({"duration_ms": 10**12}, "retention_hint.duration_ms"),
        ({"continuation": 9}, "retention_hint.continuation"),
    ],
)
def test_a_hint_that_means_nothing_is_refused(
    tiny_folder: Path, controller: ControllerThread, hint: dict[str, int], field: str
) -> None:
    """The error names the field; the worker goes on."""
    config = WorkerConfig(controller=controller.address, pool_name="strict-hints")
    runner = strict_runner(tiny_folder, block_count=16)
    with worker_thread(config, runner) as (_, client):
        request = tokens_request(
            prompt(1), retention_hint=cache_pb2.RetentionHint(**hint), **FIELDS
        )
        with pytest.raises(grpc.RpcError) as refused:
            client.generate(request)
        assert error_reason(refused.value) == "FIELD_INVALID"
        assert field in refused.value.details()
        assert client.generate(tokens_request(prompt(1), **FIELDS)).token_ids
