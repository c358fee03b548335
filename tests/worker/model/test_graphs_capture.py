"""The recordings of the backend for GPUs, on device "meta": all of it but the launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from prefixd.kernels.launch import Launch
from prefixd.worker.attention.triton import TritonBackend
from prefixd.worker.model.forward import Chunk, flatten
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.sampling import Draw, SamplingOptions
from tests.support.graphs import CaptureLint, CpuRecorder, Rerun
from tests.support.models import gpt_oss_config, llama_config, mixed_config, random_model

META = torch.device("meta")
BLOCK_SIZE = 16
CONFIGS = {"llama": llama_config, "mixed": mixed_config, "gpt_oss": gpt_oss_config}


class LintRecorder(CpuRecorder):
    """Looks at the work instead of recording it; replays do nothing."""

    def record(self, run: Callable[[], None]) -> Rerun:  # type: ignore[override]
        """Runs the work once to prepare it, and once under the lint."""
        run()
        with CaptureLint():
            run()
        return Rerun(lambda: None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be started on a GPU."""
    started: list[Launch] = []

    def run(launch: Launch) -> None:
        started.append(launch)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return started


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_recorded_passes_wait_for_nothing(family: str, launches: list[Launch]) -> None:
    """Passes and draws of every size; then a pass is loaded, whose launches need nothing new."""
    model = random_model(CONFIGS[family]())
    model.network.to(META, torch.bfloat16)
    model = replace(model, device=META, dtype=torch.bfloat16)
    kv = PagedKv(
        model.page_geometry, block_count=40, block_size=BLOCK_SIZE, dtype=model.dtype, device=META
    )
    backend = TritonBackend()
    graphs = DecodeGraphs(
        model, kv, backend, LintRecorder(), row_count_max=3, context_token_count_max=100
    )
    graphs.record()
    assert launches
    recorded_count = len(launches)
    runner = ModelRunner(model, kv, backend, graphs)
    tables = [(1 + 3 * group, 2 + 3 * group, 3 + 3 * group) for group in range(len(model.groups))]
    slots = [[table[2] * BLOCK_SIZE + 8] for table in tables]
    chunks = [Chunk([5], 40, tables, slots, 1)]
    draws = [Draw(SamplingOptions(temperature=1.0), 41)]
    assert runner.run(flatten(chunks)).shape == (1, model.vocabulary_size)
    assert runner.draw(flatten(chunks), draws).shape == (1,)
    assert len(launches) == recorded_count
