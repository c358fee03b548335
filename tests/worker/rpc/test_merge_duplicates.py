"""Equal blocks that become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefixd.v1 import inspect_pb2
from prefixd.worker.config import WorkerConfig
from tests.support.controller import ControllerThread, stubs
from tests.support.pass_runners import ObservingRunner, Wrapping
from tests.support.worker import collect, strict_runner, tokens_request, wait_idle, worker_thread

PROMPT = tuple(position * 7 % 250 for position in range(41))
FIELDS: dict[str, Any] = {"token_count_max": 9, "ignore_end_of_sequence": True}


def test_s15_equal_blocks_become_one_and_answers_stay_the_same(
    tiny_folder: Path, controller: ControllerThread
) -> None:
    """S15: two answers that read no cache hold one prompt's blocks once these are written."""
    config = WorkerConfig(controller=controller.address, pool_name="merging", merge_duplicates=True)
    runner = strict_runner(tiny_folder, block_count=64)
    requests = [tokens_request(PROMPT, skip_cache_read=True, **FIELDS) for _ in range(2)]
    with stubs(controller.address) as control:

        def held_block_count() -> int:
            request = inspect_pb2.GetPoolRequest(pool_name="merging")
            return int(control.inspect.GetPool(request).pool.held_block_count)

        wrapping = Wrapping(lambda inner: ObservingRunner(inner, held_block_count))
        with worker_thread(config, runner, wrap_runner=wrapping) as (_, client):
            alone = client.generate(requests[0]).token_ids
            wait_idle(control, "merging")
            wrapping.runner.seen.clear()
            streams = [client.worker.Generate(request, timeout=60) for request in requests]
            answers = [collect(stream).token_ids for stream in streams]
            pool = wait_idle(control, "merging")

    assert answers == [alone, alone]
    # Each holds eleven blocks when its prompt is computed; ten of them are full and equal.
    seen = wrapping.runner.seen
    assert max(seen) > 20
    assert seen[seen.index(max(seen)) + 1] < 10 + 2 * 3
    assert pool.held_block_count == 0
