"""Tokens to measure with: seeded, of the size that real vocabularies have."""

import numpy as np

from prefixd.controller.core.messages import TokenArray

VOCABULARY_SIZE = 128_000
PROMPT_TOKEN_COUNT = 8_192
"""Length of the prompts that admission is measured with."""
BLOCK_SIZE = 16


class Prompts:
    """An endless supply of prompts that share nothing."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def next(self, token_count: int = PROMPT_TOKEN_COUNT) -> TokenArray:
        """Returns a fresh prompt."""
        return self._generator.integers(0, VOCABULARY_SIZE, token_count, dtype=np.uint32)
