"""Counters at admission (S24)."""

from prefixd.controller.core import inspect
from prefixd.controller.core.limits import HIT_RATE_SEQUENCES
from prefixd.controller.core.messages import CloseReason
from prefixd.controller.core.statistics import Statistics
from tests.controller.core.driver import Driver, close_entry, decode_entry, open_entry

PROMPT = list(range(100, 113))


def view(driver: Driver) -> inspect.StatisticsView:
    """Shows the counters."""
    return inspect.pool_view(driver.pool).statistics


def test_s24_sequences_count_when_they_are_opened() -> None:
    """All tokens are queries, matched ones hits; a refused open is not counted."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.refused(open_entry(3, [1] * 80))
    counted = view(driver)
    assert (counted.sequence_count, counted.query_token_count, counted.hit_token_count) == (
        2,
        26,
        12,
    )
    assert counted.recent_hit_rate == 12 / 26


def test_s24_preempted_sequences_are_counted_apart() -> None:
    """Generated tokens are queries too; the recent hit rate does not see them."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.decode(1, 5)
    driver.close(1, CloseReason.PREEMPTED)
    driver.open(1, [*PROMPT, 5, 6], preemption_count=1)
    counted = view(driver)
    assert counted.sequence_count == 1
    assert counted.preempted_sequence_count == 1
    assert counted.preempted_query_token_count == 15
    assert counted.preempted_hit_token_count == 12
    assert counted.recent_hit_rate == 0


def test_s24_recomputed_tokens_of_a_preempted_sequence() -> None:
    """Those that its predecessor had scheduled and that do not match."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.decode(1, 5)
    driver.close(1, CloseReason.PREEMPTED)
    driver.open(1, [*PROMPT, 5, 6], preemption_count=1)
    assert driver.sequence(1).recomputed_token_count == 2
    assert view(driver).recomputed_token_count == 2


def test_s24_recomputed_tokens_of_a_cut_sequence() -> None:
    """Those that were written before the failure and do not match; unwritten ones are not."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(decode_entry((1, 13, 13, [5])), executed=1)
    driver.step(executed=1, failed=(2, 2))
    driver.extend(1, [])
    assert driver.sequence(1).recomputed_token_count == 1


def test_s24_the_recent_hit_rate_covers_the_last_sequences() -> None:
    """Older ones leave it, newer ones enter."""
    statistics = Statistics()
    statistics.count_open(query_token_count=10, hit_token_count=10)
    for _ in range(HIT_RATE_SEQUENCES - 1):
        statistics.count_open(query_token_count=10, hit_token_count=0)
    assert statistics.recent_hit_rate == 1 / HIT_RATE_SEQUENCES
    statistics.count_open(query_token_count=10, hit_token_count=0)
    assert statistics.recent_hit_rate == 0
    assert statistics.hit_token_count == 10


def test_s24_ages_at_hit_and_at_eviction() -> None:
    """How long a block had been unused; a held block has no age."""
    driver = Driver(block_count=5)
    driver.open(1, PROMPT)
    driver.step(close_entry(1))
    driver.now_ms = 5_000
    driver.open(2, PROMPT[:5])
    driver.open(3, PROMPT[:5])
    hits = view(driver).age_at_hit
    assert dict(zip(hits.upper_bounds_ms, hits.block_counts, strict=False))[10_000] == 1
    assert hits.block_counts[0] == 1
    driver.now_ms = 200_000
    driver.step(close_entry(2), close_entry(3))
    driver.open(4, [9] * 12)
    evictions = view(driver).age_at_eviction
    counts = dict(zip(evictions.upper_bounds_ms, evictions.block_counts, strict=False))
    assert (counts[10_000], counts[300_000]) == (1, 1)
    assert view(driver).evicted_block_count == 2


def test_s24_usage_is_held_over_all() -> None:
    """Block 0 counts for neither; evictable blocks are not held."""
    driver = Driver(block_count=11)
    driver.open(1, PROMPT)
    assert view(driver).usage == 0.4
    driver.close(1)
    assert view(driver).usage == 0
