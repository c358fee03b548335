"""Passes of decode in the static buffers of the backend for GPUs, kernels included."""

from __future__ import annotations

import torch

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.model.forward import Chunk, ForwardPass, flatten
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner
from tests.support.graphs import RerunRecorder
from tests.support.models import mixed_config, random_model, random_tokens

BLOCK_SIZE = 8
GROUP_OFFSET = 60
BLOCK_COUNT = 2 * GROUP_OFFSET
# Two share their first blocks; one has a block to begin.
CONTEXTS = (19, 17, 8, 1)
TABLES = ((3, 9, 4, 50), (3, 9, 21, 51), (7, 30), (12,))


def _pool(model: LoadedModel) -> PagedKv:
    return PagedKv(
        model.page_geometry,
        block_count=BLOCK_COUNT,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )


def _pass(model: LoadedModel, rows: tuple[int, ...], *, token_count: int) -> ForwardPass:
    """The last so many tokens of some sequences; each KV group has blocks of its own."""
    tokens = random_tokens(40, below=model.vocabulary_size, seed=3)
    chunks = []
    for row in rows:
        end = CONTEXTS[row]
        start = max(0, end - token_count)
        own = tokens[: BLOCK_SIZE * 2] + tokens[20 + row :]
        tables = [
            tuple(block + GROUP_OFFSET * group for block in TABLES[row])
            for group in range(len(model.groups))
        ]
        size = BLOCK_SIZE
        slots = [[t[p // size] * size + p % size for p in range(start, end)] for t in tables]
        chunks.append(Chunk(own[start:end], start, tables, slots, end - start))
    return flatten(chunks)


def test_static_buffers_hold_any_pass() -> None:
    """Four rows, then one, then three: what a larger pass left behind is not read again."""
    layers = ["sliding_attention", "full_attention"]
    model = random_model(mixed_config(num_hidden_layers=2, layer_types=layers))
    assert len(model.groups) == 2
    recorded_kv, plain_kv = _pool(model), _pool(model)
    triton, torch_backend = create_backend("triton"), create_backend("torch")
    recordings = DecodeGraphs(
        model,
        recorded_kv,
        triton,  # type: ignore[arg-type] # it is recordable
        RerunRecorder(),
        row_count_max=4,
        context_token_count_max=32,
    )
    recordings.record()
    recorded = ModelRunner(model, recorded_kv, triton, recordings)
    plain = ModelRunner(model, plain_kv, torch_backend)
    for runner in (ModelRunner(model, recorded_kv, torch_backend), plain):
        for row in (0, 1, 2):
            runner.run(_pass(model, (row,), token_count=CONTEXTS[row]))
    for rows in ((0, 1, 2, 3), (2,), (3, 1, 0)):
        forward = _pass(model, rows, token_count=1)
        assert recordings.fits(forward)
        torch.testing.assert_close(recorded.run(forward), plain.run(forward), atol=1e-4, rtol=0.0)
