"""What 8-bit KV changes in the small real model's distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kv import TOKEN_COUNT, divergence, score
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.worker.model.loaded import LoadedModel


@pytest.fixture(scope="module")
def expected(smollm2: LoadedModel) -> Tensor:
    """Logits over the demo's document with KV in float32."""
    return score(smollm2, torch.float32).logits


@pytest.mark.model
@pytest.mark.parametrize(
    ("kv_dtype", "nats_max"),
    [(torch.int8, 5e-3), (FP8_DTYPE, 2e-2)],
    ids=["int8", "fp8"],
)
def test_8_bit_kv_stays_close_to_float32(
    smollm2: LoadedModel, expected: Tensor, kv_dtype: torch.dtype, nats_max: float
) -> None:
    """Divergence over 768 tokens of shipped text; printed with the memory that a token takes."""
    scored = score(smollm2, kv_dtype)
    found = divergence(expected, scored.logits)
    print(
        f"{kv_dtype}: divergence {found.mean_mnat / 1000:.1e} nats over {TOKEN_COUNT} tokens, same"
        f" likeliest token {found.same_top_percent:.1f}%, {scored.token_byte_count} bytes per token"
    )
    assert 0 < found.mean_mnat / 1000 <= nats_max
    assert found.same_top_percent >= 90


def test_divergence_of_known_distributions() -> None:
    """One row of three against a uniform one, in thousandths of a nat; and nothing from itself."""
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    uniform = torch.zeros(2, 3)
    found = divergence(rows, uniform)
    assert found.mean_mnat == pytest.approx(1000 * (0.058892 + 0.148341) / 2, rel=1e-4)
    assert found.same_top_percent == 50
    assert divergence(rows, rows).mean_mnat == 0
