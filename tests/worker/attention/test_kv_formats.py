"""Every backend over pools of 8-bit KV: exact attention over what is stored, not over what was."""

from __future__ import annotations

import pytest
import torch

from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.oracle import Geometry, exact_answer, make_layout, make_scene
from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.seam import LayerTraits
from tests.support.backends import build_batch, every_backend

KV_DTYPES = (torch.int8, FP8_DTYPE)
BLOCK_SIZE = 16
# A cold and a late chunk of prefill, and decode rows of which two share a prefix of five blocks.
QUERIES_AND_CONTEXTS = ((9, 9), (6, 70), (1, 93), (1, 90), (1, 17))
SHARED_BLOCK_COUNTS = (0, 0, 5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("has_options", [False, True], ids=["plain", "all_options"])
@pytest.mark.parametrize("window_token_count", [None, 30])
@pytest.mark.parametrize("backend", every_backend())
def test_8_bit_pool_equals_float64(
    backend: str, window_token_count: int | None, has_options: bool, kv_dtype: torch.dtype
) -> None:
    """Elements times scales, in prefill, decode and cascade; scales of unwritten slots are NaN."""
    layout = make_layout(
        QUERIES_AND_CONTEXTS, block_size=BLOCK_SIZE, shared_block_counts=SHARED_BLOCK_COUNTS
    )
    scene = make_scene(layout, Geometry(4, 2, 16, 24, kv_dtype=kv_dtype))
    sinks = torch.linspace(-1.0, 1.0, 4) if has_options else None
    softcap = 2.0 if has_options else None
    traits = LayerTraits(0.25, window_token_count, softcap, sinks)
    sequences, row = [], 0
    for table, (query_count, context) in zip(
        layout.block_tables, QUERIES_AND_CONTEXTS, strict=True
    ):
        block_ids = tuple(table[: -(-context // BLOCK_SIZE)].tolist())
        sequences.append(SequenceRows(row, query_count, context, block_ids))
        row += query_count
    slots = torch.zeros(row, dtype=torch.int64)
    plan = create_backend(backend).plan(build_batch(slots, sequences, block_size=BLOCK_SIZE))
    actual = plan.attend(scene.query, scene.layer, traits)
    options = AttentionOptions(0.25, window_token_count, softcap, sinks)
    expected = exact_answer(scene, options).float()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
