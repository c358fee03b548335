"""The contract of the backends: what each family asks of attention, within 1e-5 of float64.

The queries, keys and values are those of a model of the family, in passes that mix a chunk on a
cached prefix with rows of decode that share blocks. Every slot that no sequence wrote holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.oracle import Scene, exact_answer
from prefixd.kernels.work_list import PassLayout
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.seam import AttentionPlan, LayerTraits
from prefixd.worker.attention.strict import StrictBackend
from prefixd.worker.model.forward import flatten
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner
from tests.support.backends import contract_backend, contract_backends
from tests.support.families import FAMILIES
from tests.support.models import PagedHarness, random_tokens

DIFFERENCE_MAX = 1e-5
"""Largest difference, relative to the largest value of a pass, or 1 where all are smaller."""

BLOCK_SIZE = 4
SHARED_TOKEN_COUNT = 8
# The second and third sequence begin with the first two blocks of the first one.
TABLES = ((9, 3, 12, 5, 14, 7, 2), (9, 3, 13, 6, 17, 18, 19), (9, 3, 20))


@dataclass(frozen=True)
class Attention:
    """One call of a layer, and its exact answer."""

    batch: AttentionBatch
    query: Tensor
    layer: LayerKv
    traits: LayerTraits
    expected: Tensor


class Recorder(StrictBackend):
    """Keeps what attention is asked in a pass, once for each kind of layer."""

    def __init__(self) -> None:
        self.recorded: list[Attention] = []

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """A plan whose calls are recorded."""
        inner, recorded, seen = super().plan(batch), self.recorded, set()

        class Plan:
            def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
                kind = (
                    query.shape,
                    layer.values.shape,
                    traits.window_token_count,
                    traits.scaling,
                )
                if kind not in seen:
                    seen.add(kind)
                    recorded.append(attention(batch, query, layer, traits))
                return inner.attend(query, layer, traits)

        return Plan()


def attention(
    batch: AttentionBatch, query: Tensor, layer: LayerKv, traits: LayerTraits
) -> Attention:
    """A call with copies of what it reads."""
    query, layer = query.clone(), LayerKv(layer.keys.clone(), layer.values.clone())
    layout = PassLayout(
        batch.block_tables,
        np.array([rows.query_start for rows in batch.sequences], np.int64),
        np.array([rows.query_token_count for rows in batch.sequences], np.int64),
        np.array([rows.context_token_count for rows in batch.sequences], np.int64),
        batch.row_count,
        BLOCK_SIZE,
        layer.slot_count // BLOCK_SIZE,
    )
    options = AttentionOptions(
        traits.scaling, traits.window_token_count, traits.softcap, traits.sinks
    )
    expected = exact_answer(Scene(layout, layer, query), options)
    return Attention(batch, query, layer, traits, expected)


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, family_model: Callable[[str], LoadedModel]
) -> list[Attention]:
    """What a model of a family asks in two passes."""
    model = family_model(request.param)
    harness = PagedHarness(model, backend="strict", block_count=21, block_size=BLOCK_SIZE)
    for page in range(harness.kv.page_count):
        layer = harness.kv.layer(page)
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    first, second, third = (random_tokens(27, below=150, seed=seed) for seed in (1, 2, 3))
    second[:SHARED_TOKEN_COUNT] = third[:SHARED_TOKEN_COUNT] = first[:SHARED_TOKEN_COUNT]
    shared = SHARED_TOKEN_COUNT
    harness.run(harness.chunk(first, TABLES[0], 0, 24))
    recorder = Recorder()
    runner = ModelRunner(model, harness.kv, recorder)
    for chunks in (
        (
            harness.chunk(first, TABLES[0], 24, 25),
            harness.chunk(second, TABLES[1], shared, 24),
            harness.chunk(third, TABLES[2], shared, shared + 1),
        ),
        (
            harness.chunk(first, TABLES[0], 25, 26),
            harness.chunk(second, TABLES[1], 24, 25),
            harness.chunk(third, TABLES[2], shared + 1, shared + 2),
        ),
    ):
        runner.run(flatten(chunks))
    return recorder.recorded


@pytest.mark.parametrize("recorded", FAMILIES, indirect=True)
@pytest.mark.parametrize("backend", contract_backends())
def test_backend_equals_float64_on_family(recorded: list[Attention], backend: str) -> None:
    """A chunk beside rows of decode, then rows of decode alone."""
    chosen = contract_backend(backend)
    assert recorded
    for one in recorded:
        plan = chosen.plan(one.batch)
        actual = plan.attend(one.query, one.layer, one.traits).double()
        row_count = one.batch.sequences[-1].query_rows.stop
        scale = max(1.0, float(one.expected.abs().max()))
        torch.testing.assert_close(
            actual[:row_count], one.expected[:row_count], atol=DIFFERENCE_MAX * scale, rtol=0.0
        )
