"""How far from exact the answers of attention are, and may be."""

import torch
from torch import Tensor

ERROR_MAX = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest distance of a row of one head from the exact one, relative to the latter's length: by
the query's dtype, in which weights and answers are rounded."""

ERROR_UNIT = "of a row"
"""What these numbers are parts of."""


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The worst head of every row, float64 (rows,); rows of zeros are off by what they are.

    Args:
        actual: (rows, query heads, value width), on the CPU.
        expected: float64, likewise.
    """
    distances = (actual.double() - expected).norm(dim=-1)
    lengths = expected.norm(dim=-1)
    errors: Tensor = distances / torch.where(lengths == 0, 1.0, lengths)
    return errors.amax(-1)
