"""What a trace can be replayed on: the naive model, the core's pool, a pool behind gRPC."""

from dataclasses import dataclass
from typing import Protocol

from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.messages import PoolSpec, Step, StepReply
from tests.golden.traces import BlockEvent, Trace
from tests.model.digests import root_digest
from tests.model.steps import NaiveLog


@dataclass(frozen=True, slots=True)
class State:
    """Everything that can be seen of a pool, in plain values."""

    free_order: tuple[int, ...]
    cached: dict[str, list[int]]
    reference_counts: dict[int, int]
    tables: dict[str, list[int]]


class Subject(Protocol):
    """A pool that a trace is replayed on."""

    def apply(self, step: Step) -> StepReply:
        """Applies a step."""

    def flush(self) -> bool:
        """Flushes the pool; False where it is refused."""

    def state(self) -> State:
        """Reads the whole state."""

    def statistics(self) -> dict[str, int]:
        """Reads the admission counters, under their names in the trace files."""

    def events(self) -> list[BlockEvent] | None:
        """Reads what happened since the last read; None where the subject tells no events."""


def spec_of(trace: Trace, *, pool_name: str) -> PoolSpec:
    """Returns the pool that a trace was recorded on."""
    return PoolSpec(
        pool_name=pool_name,
        block_count=trace.block_count,
        block_size=trace.block_size,
        caching_disabled=trace.caching_disabled,
    )


class NaiveSubject:
    """The naive model as a subject."""

    def __init__(self, trace: Trace) -> None:
        self._log = NaiveLog(spec_of(trace, pool_name="naive"))
        self._algorithm = trace.hash_algorithm
        self._root = root_digest(trace.hash_algorithm, seed=trace.hash_seed)

    def apply(self, step: Step) -> StepReply:
        """Applies a step."""
        return self._log.apply_step(step)

    def flush(self) -> bool:
        """Flushes the pool; False where it is refused."""
        try:
            self._log.flush()
        except BlocksInUse:
            return False
        return True

    def state(self) -> State:
        """Reads the whole state."""
        log = self._log
        return State(
            free_order=tuple(log.free),
            cached={
                log.digest_of(place, algorithm=self._algorithm, root=self._root).hex(): [block]
                for block, place in log.published().items()
            },
            reference_counts={int(block): count for block, count in log.reference_counts().items()},
            tables={
                sequence.sequence_id: list(sequence.table) for sequence in log.sequences.values()
            },
        )

    def statistics(self) -> dict[str, int]:
        """Reads the admission counters, under their names in the trace files."""
        counted = self._log.statistics
        return {
            "requests": counted.sequence_count,
            "queries": counted.query_token_count,
            "hits": counted.hit_token_count,
            "preempted_requests": counted.preempted_sequence_count,
            "preempted_queries": counted.preempted_query_token_count,
            "preempted_hits": counted.preempted_hit_token_count,
        }

    def events(self) -> None:
        """The naive model tells none."""
