from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.kernels.layer_kv import (
    FP8_DTYPE,
    LayerKv,
    dequantize,
    dequantize_into,
    fp8_refusal,
    quantize_rows,
)

ERRORS = {torch.int8: 0.5 / 127, FP8_DTYPE: 1 / 16}
"""Largest error relative to a head's largest magnitude: half a step of int8, half of e4m3's last
of three mantissa bits."""


@pytest.mark.parametrize("dtype", ERRORS)
@settings(max_examples=50)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 1000))
def test_rows_survive_quantization(dtype: torch.dtype, exponent: int, seed: int) -> None:
    """Whatever a head's magnitude, its elements come back within the format's error."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 2, 16, generator=generator) * 2.0**exponent
    quantized = quantize_rows(rows, dtype)
    assert dtype == quantized.elements.dtype
    error = (quantized.dequantized() - rows).abs()
    assert (error <= ERRORS[dtype] * rows.abs().amax(-1, keepdim=True) * 1.001).all()
    assert torch.equal(quantized.dequantized(), dequantize(quantized.elements, quantized.scales))


@pytest.mark.parametrize("dtype", ERRORS)
def test_a_stored_token_depends_on_itself_alone(dtype: torch.dtype) -> None:
    """A token quantized among others has the bits that it has alone: chunks do not matter."""
    rows = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1))
    together = quantize_rows(rows, dtype)
    for index in range(5):
        alone = quantize_rows(rows[index : index + 1], dtype)
        assert torch.equal(alone.scales[0], together.scales[index])
        elements = together.elements[index].view(torch.uint8)
        assert torch.equal(alone.elements[0].view(torch.uint8), elements)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_dequantized_in_place_with_one_rounding(
    dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    """Every number that the format has, under scales of every size."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    elements = numbers.expand(9, 256)
    scales = 10.0 ** torch.arange(-6, 3)
    target = torch.full((9, 256), 7.0, dtype=target_dtype)
    dequantize_into(target, elements, scales)
    expected = dequantize(elements, scales).to(target_dtype)
    torch.testing.assert_close(target, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_fp8_is_served_from_compute_capability_8_9_on(capability: tuple[int, int]) -> None:
    """Ada, Hopper and Blackwell convert e4m3."""
    assert fp8_refusal(capability) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_fp8_is_refused_below(capability: tuple[int, int]) -> None:
    """The reason names what is needed and what is there."""
    refusal = fp8_refusal(capability)
    assert refusal is not None
    assert "8.9" in refusal
    assert f"{capability[0]}.{capability[1]}" in refusal


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("element", [torch.nan, torch.inf, -torch.inf])
def test_no_number_is_read_from_a_head_that_is_not_finite(
    dtype: torch.dtype, element: float
) -> None:
    """Broken weights show in answers; they do not turn into numbers in the pool."""
    rows = torch.ones(2, 2, 16)
    rows[1, 0, 5] = element
    read = quantize_rows(rows, dtype).dequantized()
    assert read[1, 0].isnan().all()
    assert torch.equal(read[1, 1], read[0, 0])


def bad_layers() -> dict[str, dict[str, Any]]:
    """Arguments that contradict each other."""
    pool = torch.zeros(8, 2, 16)
    scales = torch.ones(8, 2)
    eight = pool.to(torch.int8)
    both = {"key_scales": scales, "value_scales": scales}
    return {
        "heads": {"keys": pool, "values": torch.zeros(8, 1, 16)},
        "dtypes": {"keys": pool, "values": pool.half()},
        "devices": {"keys": pool, "values": pool.to("meta")},
        "elements_apart": {"keys": pool.transpose(1, 2).contiguous().transpose(1, 2)},
        "scales_missing": {"keys": eight, "values": eight},
        "scales_in_vain": {"keys": pool, "values": pool, **both},
        "scales_of_other_shape": {"keys": eight, "values": eight, **both, "key_scales": scales[:4]},
        "scales_of_other_dtype": {
            "keys": eight,
            "values": eight,
            **both,
            "value_scales": scales.half(),
        },
    }


@pytest.mark.parametrize("name", bad_layers())
def test_contradictions_are_refused(name: str) -> None:
    """A layer that a kernel would misread is not made."""
    arguments = bad_layers()[name]
    with pytest.raises(AssertionError):
        LayerKv(**({"values": torch.zeros(8, 2, 16)} | arguments))
