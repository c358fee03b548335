"""The counters of the naive model: admissions and evictions."""

from dataclasses import dataclass, field


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
    first_opens: list[tuple[int, int]] = field(default_factory=list)

    @property
    def recent_hit_rate(self) -> float:
        """Share of tokens found in the cache, over the last 1,000 sequences opened first."""
        recent = self.first_opens[-1_000:]
        query_token_count = sum(query for query, _ in recent)
        if not query_token_count:
            return 0.0
        return sum(hit for _, hit in recent) / query_token_count

    def count_open(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Counts a sequence opened for the first time."""
        self.sequence_count += 1
        self.query_token_count += query_token_count
        self.hit_token_count += hit_token_count
        self.first_opens.append((query_token_count, hit_token_count))

    def count_reopen(self, *, query_token_count: int, hit_token_count: int) -> None:
        """Counts a sequence opened again after preemption."""
        self.preempted_sequence_count += 1
        self.preempted_query_token_count += query_token_count
        self.preempted_hit_token_count += hit_token_count
