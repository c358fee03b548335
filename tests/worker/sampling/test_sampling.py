"""Sampling: the distribution, its limits, and that a draw depends on seed and position alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.worker.sampling import (
    ROWS_AT_ONCE,
    Draw,
    DrawField,
    SamplingInvalid,
    SamplingOptions,
    choose,
    draw_parameters,
    draw_rows,
    weigh,
)

LOGITS = torch.tensor([1.0, 3.0, 2.0, -torch.inf, 0.0])


def sample(logits: torch.Tensor, rows: Sequence[Draw]) -> list[int]:
    """The chosen tokens, one per row."""
    token_ids: list[int] = choose(logits, rows).tolist()
    return token_ids


def probabilities(logits: torch.Tensor, options: SamplingOptions) -> dict[int, float]:
    """The probability of each token id; zero for those that the options remove."""
    parameters = torch.from_numpy(draw_parameters([Draw(options, 0)]))
    token_ids, weights = weigh(logits[None], parameters)
    shares = weights[0] / weights.sum()
    return dict(zip(token_ids[0].tolist(), shares.tolist(), strict=True))


def kept(options: SamplingOptions, logits: torch.Tensor = LOGITS) -> set[int]:
    """The token ids that can be drawn."""
    return {token_id for token_id, share in probabilities(logits, options).items() if share > 0}


def draws(options: SamplingOptions, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    """Tokens at positions 0 to count - 1, all from the same logits."""
    return sample(logits.expand(count, -1), [Draw(options, position) for position in range(count)])


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    """Rows are independent; seed and position change nothing."""
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [0.0, 0.0, 1.0]])
    rows = [Draw(SamplingOptions(seed=seed), position=seed * 7) for seed in (1, 2, 3)]
    assert [1, 0, 2] == sample(logits, rows)


def test_no_rows_give_no_tokens() -> None:
    """An empty batch is fine."""
    assert sample(torch.zeros(0, 5), []) == []


def test_draws_follow_the_distribution() -> None:
    """20,000 positions: each frequency within four standard deviations of its probability."""
    count = 20_000
    options = SamplingOptions(temperature=1.5, seed=11)
    expected = torch.softmax(LOGITS / 1.5, dim=0)
    seen = Counter(draws(options, count))
    for token_id, probability in enumerate(expected.tolist()):
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(seen[token_id] / count - probability) <= 4 * deviation


@pytest.mark.parametrize(("top_k", "expected"), [(1, {1}), (2, {1, 2}), (3, {0, 1, 2})])
def test_top_k_keeps_the_likeliest(top_k: int, expected: set[int]) -> None:
    """The rest cannot be drawn."""
    assert expected == kept(SamplingOptions(temperature=1.0, top_k=top_k))


@pytest.mark.parametrize("top_k", [0, 5, 1_000])
def test_top_k_may_exceed_the_vocabulary(top_k: int) -> None:
    """0 and large values keep every token that has a probability."""
    assert {0, 1, 2, 4} == kept(SamplingOptions(temperature=1.0, top_k=top_k))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities 0.5, 0.25, 0.125, 0.125: the set grows when p passes a sum."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    sizes = {
        p: len(kept(SamplingOptions(temperature=1.0, top_p=p), logits))
        for p in (0.01, 0.49, 0.51, 0.74, 0.76, 0.99, 1.0)
    }
    assert {0.01: 1, 0.49: 1, 0.51: 2, 0.74: 2, 0.76: 3, 0.99: 4, 1.0: 4} == sizes


def test_top_p_counts_what_top_k_left() -> None:
    """The rest is renormalised first: of 0.5 and 0.25, the first alone is two thirds."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert {0} == kept(SamplingOptions(temperature=1.0, top_k=2, top_p=0.6), logits)


def test_temperature_sharpens_and_flattens() -> None:
    """Low temperatures approach greedy, high ones the uniform distribution."""
    sharp = probabilities(LOGITS, SamplingOptions(temperature=0.05))
    flat = probabilities(LOGITS, SamplingOptions(temperature=100.0))
    assert sharp[1] > 0.999_999
    assert flat[4] > 0.24


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """Nothing overflows on the way to zero."""
    assert [1] * 5 == draws(SamplingOptions(temperature=temperature), 5)


def test_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    """50 positions in a row."""
    first = draws(SamplingOptions(temperature=1.0, seed=5), 50)
    assert first == draws(SamplingOptions(temperature=1.0, seed=5), 50)
    assert first != draws(SamplingOptions(temperature=1.0, seed=6), 50)
    assert len(set(first)) > 1


def test_draw_does_not_depend_on_its_batch() -> None:
    """A token sampled again in other company, after a preemption say, is the same."""
    options = SamplingOptions(temperature=1.0, top_k=4, top_p=0.95, seed=2**64 - 1)
    together = draws(options, 20)
    alone = [sample(LOGITS[None], [Draw(options, position)])[0] for position in range(20)]
    greedy = Draw(SamplingOptions(), 0)
    mixed = [
        sample(torch.stack([LOGITS, LOGITS]), [greedy, Draw(options, position)])[1]
        for position in range(20)
    ]
    assert together == alone == mixed


def test_rows_drawn_on_the_device_are_those_sampled() -> None:
    """In more parts than one."""
    options = [
        SamplingOptions(temperature=0.8, seed=2),
        SamplingOptions(temperature=1.5, top_k=3, seed=3),
        SamplingOptions(temperature=1.0, top_p=0.6, seed=2**64 - 1),
        SamplingOptions(temperature=2.0, top_k=1_000, top_p=0.9, seed=5),
    ]
    count = 2 * ROWS_AT_ONCE + 3
    rows = [Draw(options[row % len(options)], row) for row in range(count)]
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(1)) * 3
    drawn = draw_rows(logits, torch.from_numpy(draw_parameters(rows)))
    assert drawn.tolist() == sample(logits, rows)
    assert drawn.tolist() != logits.argmax(dim=-1).tolist()


def test_uniform_numbers_are_numpys() -> None:
    """Seed and position name one number of a published generator, in whatever order they come."""
    places = [(0, 0), (2**64 - 1, 1), (5, 10_000_000), (5, 7), (5, 7), (0, 0)]
    rows = [Draw(SamplingOptions(temperature=1.0, seed=seed), at) for seed, at in places]
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=at << 64)).random()
        for seed, at in places
    ]
    assert draw_parameters(rows)[DrawField.UNIFORM].tolist() == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_options_outside_their_limits_are_refused(options: dict[str, Any], field: str) -> None:
    """The error names the field, its value and its limit."""
    with pytest.raises(SamplingInvalid, match=rf"{field} is .*, but must be ") as raised:
        SamplingOptions(**options)
    assert field == raised.value.field
