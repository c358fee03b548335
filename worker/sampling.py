"""Turns logits into token ids: greedy, or temperature with top-k and top-p, seeded.

The draw for a token is a pure function of (seed, position): the generator is counter based, so a
token sampled again after a preemption, a failed step or a restart comes out the same, whatever
else shares its batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TEMPERATURE_MAX = 100.0
SEED_MAX = 2**64 - 1


class SamplingInvalid(ValueError):
    """A sampling option is outside its limits; nothing was sampled."""

    def __init__(
        self, field: str, value: float, limit: str, *, bounds: Mapping[str, int | float]
    ) -> None:
        super().__init__(f"{field} is {value}, but must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit
        self.numbers = {field: value, **bounds}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to choose the tokens of one sequence.

    Attributes:
        temperature: 0 is greedy; the other options then change nothing.
        top_k: keep the k likeliest tokens; 0 keeps all. Ties at the border are all kept.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all.
            Applied after top_k, to the renormalised rest.
        seed: fixes the draws. The caller chooses one where its client did not.

    Raises:
        SamplingInvalid: names the field and its limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every limit."""
        if not 0.0 <= self.temperature <= TEMPERATURE_MAX:  # also refuses NaN
            limit = f"between 0 and {TEMPERATURE_MAX:g}"
            bounds = {"temperature_min": 0, "temperature_max": TEMPERATURE_MAX}
            raise SamplingInvalid("temperature", self.temperature, limit, bounds=bounds)
        if self.top_k < 0:
            limit = "at least 0 (0 keeps every token)"
            raise SamplingInvalid("top_k", self.top_k, limit, bounds={"top_k_min": 0})
        if not 0.0 < self.top_p <= 1.0:
            bounds = {"top_p_min": 0, "top_p_max": 1}
            raise SamplingInvalid("top_p", self.top_p, "above 0 and at most 1", bounds=bounds)
        if not 0 <= self.seed <= SEED_MAX:
            bounds = {"seed_min": 0, "seed_max": SEED_MAX}
            raise SamplingInvalid("seed", self.seed, "between 0 and 2**64 - 1", bounds=bounds)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: the options of its sequence and the position it will stand at."""

    options: SamplingOptions
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Chooses one token per row.

    Args:
        logits: (rows, vocabulary), any floating dtype; probabilities are computed in float64.
        draws: one per row.

    Returns:
        The token ids. Greedy rows take the lowest id among equals.
    """
    assert logits.dim() == 2, logits.shape
    assert logits.shape[0] == len(draws), (logits.shape, len(draws))
    if not draws:
        return []
    # One argmax serves all greedy rows, and its result crosses to the host once.
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if not draw.options.is_greedy:
            token_ids[row] = _draw(logits[row], draw)
    return token_ids


def probabilities(logits: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """The distribution that a non-greedy draw follows.

    Args:
        logits: (vocabulary,), at least one of them finite.
        options: not greedy.

    Returns:
        Token ids in descending order of probability, and their probabilities (float64, zero for
        those that top_k and top_p remove, sum 1). Both have shape (vocabulary,).
    """
    assert not options.is_greedy
    ordered, token_ids = torch.sort(logits.double(), descending=True, stable=True)
    # The largest becomes 0 first, so that no temperature, however low, overflows.
    scaled = (ordered - ordered[0]) / options.temperature
    if 0 < options.top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < scaled[options.top_k - 1], -torch.inf)
    weights = torch.softmax(scaled, dim=-1)
    # A token stays while the mass before it is below p, so the likeliest one always stays.
    mass_before = weights.cumsum(dim=-1) - weights
    weights = weights.masked_fill(mass_before >= options.top_p, 0.0)
    return token_ids, weights / weights.sum()


def _draw(logits: Tensor, draw: Draw) -> int:
    """Inverts the cumulative distribution at one uniform number."""
    token_ids, weights = probabilities(logits, draw.options)
    cumulative = weights.cumsum(dim=-1)
    uniform = torch.tensor(_uniform(draw), dtype=cumulative.dtype, device=cumulative.device)
    # Scaled by the last sum, which rounding may leave a hair off 1.
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    kept_count = torch.count_nonzero(weights)
    return int(token_ids[torch.minimum(index, kept_count - 1)])


def _uniform(draw: Draw) -> float:
    """A number in [0, 1) that depends on seed and position only."""
    generator = np.random.Generator(
        np.random.Philox(key=draw.options.seed, counter=draw.position << 64)
    )
    return float(generator.random())
