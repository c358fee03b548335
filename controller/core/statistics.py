"""Counters of a pool (rule S24)."""

from bisect import bisect_right
from collections import deque

from prefixd.controller.core.limits import HIT_RATE_SEQUENCES

AGE_BOUNDS_MS = (10, 100, 1_000, 10_000, 60_000, 300_000, 1_800_000, 7_200_000, 86_400_000)
"""Upper bounds of the age histograms."""


class AgeHistogram:
    """Blocks counted by age; the last count has no upper bound."""

    def __init__(self) -> None:
        self.block_counts = [0] * (len(AGE_BOUNDS_MS) + 1)

    def add(self, *, age_ms: int, block_count: int) -> None:
        """Count blocks of one age."""
        self.block_counts[bisect_right(AGE_BOUNDS_MS, age_ms)] += block_count


class Statistics:
    """Counts at admission only: sequences, their tokens, and those found in the cache.

    Sequences opened again after preemption are counted apart and do not enter the recent hit rate.
    `recomputed_token_count`: tokens scheduled again although an earlier plan had covered them. An
    open with a preemption count adds the positions that its closed predecessor of the same id had
    scheduled and that did not match; an extend after a failed step adds the positions that were
    written before it and did not match.
    """

    def __init__(self) -> None:
        self.sequence_count = 0
        self.query_token_count = 0
        self.hit_token_count = 0
        self.preempted_sequence_count = 0
        self.preempted_query_token_count = 0
        self.preempted_hit_token_count = 0
        self.evicted_block_count = 0
        self.recomputed_token_count = 0
        self.age_at_eviction = AgeHistogram()
        self.age_at_hit = AgeHistogram()
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_query_count = 0
        self._recent_hit_count = 0

    @property
    def recent_hit_rate(self) -> float:
        """Share of tokens found in the cache over the last sequences; 0 before the first one."""
        if self._recent_query_count == 0:
            return 0.0
        return self._recent_hit_count / self._recent_query_count

    def count_open(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Count a sequence that was opened for the first time."""
        self.sequence_count += 1
        self.query_token_count += query_token_count
        self.hit_token_count += hit_token_count
        self._recent.append((query_token_count, hit_token_count))
        self._recent_query_count += query_token_count
        self._recent_hit_count += hit_token_count
        if len(self._recent) > HIT_RATE_SEQUENCES:
            old_query_count, old_hit_count = self._recent.popleft()
            self._recent_query_count -= old_query_count
            self._recent_hit_count -= old_hit_count

    def count_reopen(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Count a sequence that was preempted before."""
        self.preempted_sequence_count += 1
        self.preempted_query_token_count += query_token_count
        self.preempted_hit_token_count += hit_token_count

    def count_eviction(self, *, age_ms: int, block_count: int) -> None:
        """Count cached blocks that were taken for new use."""
        self.evicted_block_count += block_count
        self.age_at_eviction.add(age_ms=age_ms, block_count=block_count)
