"""Turns logits into token ids: greedy, or temperature with top-k and top-p, seeded.

The draw for a token is a pure function of (seed, position): the generator is counter based, so a
token sampled again after a preemption, a failed step or a restart comes out the same, whatever
else shares its batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TEMPERATURE_MAX = 100.0
SEED_MAX = 2**64 - 1
ROWS_AT_ONCE = 16
"""Rows sorted together: what they need of memory is several times their logits."""


class DrawField(IntEnum):
    """Rows of the array that tells how to draw."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    UNIFORM = 3


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


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Chooses one token per row; rows that are not greedy are sorted, so they go apart.

    Args:
        logits: (rows, vocabulary), any floating dtype; probabilities are computed in float64.
        draws: one per row.

    Returns:
        Token ids, int64 (rows,), on the device. Greedy rows take the lowest id among equals.
    """
    assert logits.dim() == 2, logits.shape
    assert logits.shape[0] == len(draws), (logits.shape, len(draws))
    if not draws:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    token_ids = logits.argmax(dim=-1)
    drawn_rows = [row for row, draw in enumerate(draws) if not draw.options.is_greedy]
    if drawn_rows:
        rows = torch.tensor(drawn_rows, device=logits.device)
        parameters = draw_parameters([draws[row] for row in drawn_rows])
        token_ids[rows] = draw_rows(logits[rows], torch.from_numpy(parameters).to(logits.device))
    return token_ids


def draw_parameters(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """What `draw_rows` needs of draws, none of them greedy: float64 (fields, rows), by `DrawField`.

    Any number of columns of ones is a valid set of parameters, too.
    """
    parameters = np.empty((len(DrawField), len(draws)))
    uniforms = _Uniforms()
    for row, draw in enumerate(draws):
        options = draw.options
        assert not options.is_greedy, "greedy rows are not drawn"
        uniform = uniforms.at(seed=options.seed, position=draw.position)
        parameters[:, row] = (options.temperature, options.top_k, options.top_p, uniform)
    return parameters


def draw_rows(logits: Tensor, parameters: Tensor) -> Tensor:
    """Draws one token per row by inverting its cumulative distribution at a uniform number.

    Reads no number from the device, so that a graph can record it.

    Args:
        logits: (rows, vocabulary), any floating dtype.
        parameters: float64 (fields, rows), see `draw_parameters`.

    Returns:
        Token ids, int64 (rows,).
    """
    parts = zip(
        torch.split(logits, ROWS_AT_ONCE), torch.split(parameters, ROWS_AT_ONCE, dim=1), strict=True
    )
    return torch.cat([_draw_some(*part) for part in parts])


def _draw_some(logits: Tensor, parameters: Tensor) -> Tensor:
    token_ids, weights = weigh(logits, parameters)
    cumulative = weights.cumsum(dim=-1)
    # Scaled by the last sum, for the weights do not add up to 1.
    targets = parameters[DrawField.UNIFORM, :, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, targets, right=True)
    index = torch.minimum(index, torch.count_nonzero(weights, dim=-1)[:, None] - 1)
    return token_ids.gather(1, index)[:, 0]


def weigh(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The distributions that rows are drawn from.

    Args:
        logits: (rows, vocabulary), at least one of each row finite.
        parameters: float64 (fields, rows), see `draw_parameters`.

    Returns:
        Token ids by descending logit, and weights in proportion to their probabilities: float64,
        zero for what top_k and top_p remove. Both have shape (rows, vocabulary).
    """
    ordered, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    # The largest becomes 0 first, so that no temperature, however low, overflows.
    scaled = (ordered - ordered[:, :1]) / parameters[DrawField.TEMPERATURE, :, None]
    vocabulary_size = logits.shape[1]
    top_k = parameters[DrawField.TOP_K, :, None].clamp(max=vocabulary_size).long()
    # 0 keeps all, so its border is the last place, as that of the whole vocabulary.
    border = scaled.gather(1, (top_k - 1) % vocabulary_size)
    scaled = scaled.masked_fill(scaled < border, -torch.inf)
    weights = torch.softmax(scaled, dim=-1)
    # A token stays while the mass before it is below p, so the likeliest one always stays.
    mass_before = weights.cumsum(dim=-1) - weights
    return token_ids, weights.masked_fill(mass_before >= parameters[DrawField.TOP_P, :, None], 0.0)


class _Uniforms:
    """Numbers in [0, 1), each a function of a seed and a position.

    Invariant: each is the first that numpy draws from Philox with the seed as its key and the
    position as the second word of its counter. One generator serves all, since to set its state
    takes a tenth of the time that it takes to make one.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state: Any = self._philox.state

    def at(self, *, seed: int, position: int) -> float:
        """The number of a seed and a position."""
        self._state["state"]["key"][:] = (seed, 0)
        self._state["state"]["counter"][:] = (0, position, 0, 0)
        self._philox.state = self._state
        return (int(self._philox.random_raw()) >> 11) * 2.0**-53
