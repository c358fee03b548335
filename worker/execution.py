"""Executes a step on a model: copies, one forward pass, and what its logits tell."""

from collections.abc import Sequence
from typing import Protocol

from prefixd.worker.model.forward import BlockCopy, Chunk, flatten
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.reading import LogitRead, LogitReading, read_logits
from prefixd.worker.step import PassPlan, PlannedChunk


class PassRunner(Protocol):
    """Executes passes, one at a time."""

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Executes a pass whole and reads its logits.

        Args:
            plan: at least one chunk or copy.
            reads: one for each chunk that wants logits, in order.

        Returns:
            One reading per read.

        Raises:
            Exception: the pass did not run to its end; what it wrote counts for nothing.
        """
        ...


class ModelPassRunner:
    """Executes passes on a Hugging Face model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Executes a pass whole and reads its logits; see `PassRunner`."""
        copies = tuple(
            BlockCopy(copy.source_block_id, copy.target_block_id, copy.token_count)
            for copy in plan.copies
        )
        if not plan.chunks:
            self._runner.copy(copies)
            return []
        logits = self._runner.run(flatten([_chunk(chunk) for chunk in plan.chunks], copies))
        row_counts = [c.logit_token_count for c in plan.chunks if c.wants_logits]
        return read_logits(logits, row_counts, reads)


def _chunk(planned: PlannedChunk) -> Chunk:
    return Chunk(
        token_ids=planned.token_ids,
        start_position=planned.start_position,
        tables=planned.tables,
        slots=planned.slots,
        logit_token_count=planned.logit_token_count,
        lora_name=planned.sequence.lora.name if planned.sequence.lora else "",
    )
