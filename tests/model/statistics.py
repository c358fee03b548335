"""The counters of the naive model: admissions and evictions."""

from dataclasses import dataclass


@dataclass
class NaiveStatistics:
    """Counts at admission only (S24)."""

    sequence_count: int = 0
    query_token_count: int = 0
    hit_token_count: int = 0
    preempted_sequence_count: int = 0
    preempted_query_token_count: int = 0
    preempted_hit_token_count: int = 0
    evicted_block_count: int = 0

    def count_open(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Counts a sequence opened for the first time."""
        self.sequence_count += 1
        self.query_token_count += query_token_count
        self.hit_token_count += hit_token_count

    def count_reopen(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Counts a sequence opened again after preemption."""
        self.preempted_sequence_count += 1
        self.preempted_query_token_count += query_token_count
        self.preempted_hit_token_count += hit_token_count
