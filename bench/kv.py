"""What 8-bit KV costs in answers and time and saves in memory, on the small real model."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.figures import Figure
from bench.measure import Timed, in_turns, ratio_of
from bench.small_model import (
    BLOCK_SIZE,
    SHARED_TOKEN_COUNT,
    SHARING_COUNT,
    decode_pass,
    filled_runner,
    small_model,
)
from prefixd.clients.demo import scenario
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.model.forward import Chunk, flatten
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.runner import ModelRunner

TOKEN_COUNT = 768
ROWS_AT_A_TIME = 64
"""Distributions over the vocabulary that are compared at a time."""
DECODE_ROUND_COUNT = 5
DIVERGENCE_MAX_MNAT = {torch.int8: 5.0, FP8_DTYPE: 20.0}
NAMES = {torch.int8: "int8", FP8_DTYPE: "fp8"}


@dataclass(frozen=True, slots=True)
class Scored:
    """One pass over the text.

    Attributes:
        logits: float32 (tokens, vocabulary).
        token_byte_count: memory of one token in the pool.
    """

    logits: Tensor
    token_byte_count: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one pass is from another.

    Attributes:
        mean_mnat: Kullback-Leibler divergence, mean of all positions, in thousandths of a nat.
        same_top_percent: positions where both have the same likeliest token.
    """

    mean_mnat: float
    same_top_percent: float


def kv_figures() -> list[Figure]:
    """Measures 8-bit KV against KV in float32."""
    model = small_model()
    return divergence_figures(model) + decode_step_figures(model)


def divergence_figures(model: LoadedModel) -> list[Figure]:
    """Measures the distributions over the demo's document."""
    expected = score(model, torch.float32)
    figures = []
    for dtype, name in NAMES.items():
        actual = score(model, dtype)
        difference = divergence(expected.logits, actual.logits)
        figures += [
            Figure(
                f"{name} KV: divergence from float32 KV over {TOKEN_COUNT} tokens",
                difference.mean_mnat,
                "mnat",
                target=DIVERGENCE_MAX_MNAT[dtype],
                target_of="value",
            ),
            Figure(f"{name} KV: same likeliest token", difference.same_top_percent, "%"),
            Figure(
                f"{name} KV: memory of one token",
                actual.token_byte_count / 1024,
                "KiB",
                baseline="float32 KV",
                baseline_value=expected.token_byte_count / 1024,
                ratio=actual.token_byte_count / expected.token_byte_count,
            ),
        ]
    return figures


def decode_step_figures(model: LoadedModel) -> list[Figure]:
    """Measures steps of decode behind 2,048 tokens, of one sequence and of 16 that share them."""
    backend = create_backend("torch")
    runners = {
        dtype: filled_runner(model, backend, kv_dtype=dtype) for dtype in (torch.float32, *NAMES)
    }
    figures = []
    for sequence_count, name in ((1, "one sequence"), (SHARING_COUNT, f"{SHARING_COUNT} sharing")):
        forward = decode_pass(sequence_count)
        samples = in_turns(
            {str(dtype): Timed(partial(runner.run, forward)) for dtype, runner in runners.items()},
            round_count=DECODE_ROUND_COUNT,
            warm_up_count=1,
        )
        baseline = samples[str(torch.float32)]
        figures += [
            Figure(
                f"{NAMES[dtype]} KV: decode step over {SHARED_TOKEN_COUNT:,} tokens, {name}",
                samples[str(dtype)].median_us / 1000,
                "ms",
                baseline="float32 KV",
                baseline_value=baseline.median_us / 1000,
                ratio=ratio_of(samples[str(dtype)], baseline),
            )
            for dtype in NAMES
        ]
    return figures


def score(model: LoadedModel, kv_dtype: torch.dtype) -> Scored:
    """Runs the first tokens of the demo's document through a model of one KV group."""
    block_count = TOKEN_COUNT // BLOCK_SIZE
    kv = PagedKv(
        model.page_geometry,
        block_count=1 + block_count,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype,
        device=model.device,
    )
    assert model.tokenizer is not None, model.name
    token_ids = model.tokenizer(scenario.manual())["input_ids"][:TOKEN_COUNT]
    assert len(token_ids) == TOKEN_COUNT, len(token_ids)
    slots = range(BLOCK_SIZE, BLOCK_SIZE + TOKEN_COUNT)
    chunk = Chunk(token_ids, 0, (range(1, 1 + block_count),), (slots,), TOKEN_COUNT)
    logits = ModelRunner(model, kv, create_backend("torch")).run(flatten([chunk]))
    return Scored(logits, kv.slot_byte_count)


def divergence(expected: Tensor, actual: Tensor) -> Divergence:
    """Compares logits (rows, vocabulary) with those that are taken for right."""
    divergences, is_same_top = [], []
    assert expected.shape == actual.shape, (expected.shape, actual.shape)
    for start in range(0, len(expected), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        right, other = (torch.log_softmax(logits[rows], -1) for logits in (expected, actual))
        divergences.append((right.exp() * (right - other)).sum(-1))
        is_same_top.append(right.argmax(-1) == other.argmax(-1))
    return Divergence(
        mean_mnat=1000 * torch.cat(divergences).mean().item(),
        same_top_percent=100 * torch.cat(is_same_top).float().mean().item(),
    )
