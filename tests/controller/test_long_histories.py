"""Long random histories of the core beside the naive model, in larger pools."""

import pytest

from tests.model.fuzz import run_seed


@pytest.mark.parametrize("seed", range(12))
def test_long_history_equals_the_model(seed: int) -> None:
    """Replies, free order, tables, digests and counters agree after each of 250 steps."""
    run_seed(seed, step_count=250)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("seed", range(1_000, 1_100))
def test_very_long_history_equals_the_model(seed: int) -> None:
    """The same over 1,500 steps, for more seeds."""
    run_seed(seed, step_count=1_500)
