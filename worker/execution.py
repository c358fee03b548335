"""Executes a step on a model: copies, one forward pass, a token per finished chunk."""

from collections.abc import Sequence
from typing import Protocol

from prefixd.worker.model.forward import BlockCopy, Chunk, flatten
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.sampling import Draw, sample
from prefixd.worker.step import PassPlan, PlannedChunk


class PassRunner(Protocol):
    """Executes passes, one at a time."""

    def run(self, plan: PassPlan, draws: Sequence[Draw]) -> list[int]:
        """Executes a pass whole and chooses tokens.

        Args:
            plan: at least one chunk or copy.
            draws: one for each chunk that wants logits, in order.

        Returns:
            One token id per draw.

        Raises:
            Exception: the pass did not run to its end; what it wrote counts for nothing.
        """
        ...


class ModelPassRunner:
    """Executes passes on a Hugging Face model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(self, plan: PassPlan, draws: Sequence[Draw]) -> list[int]:
        """Executes a pass whole and chooses tokens; see `PassRunner`."""
        copies = tuple(
            BlockCopy(copy.source_block_id, copy.target_block_id, copy.token_count)
            for copy in plan.copies
        )
        if not plan.chunks:
            self._runner.copy(copies)
            return []
        logits = self._runner.run(flatten([_chunk(chunk) for chunk in plan.chunks], copies))
        return sample(logits, draws)


def _chunk(planned: PlannedChunk) -> Chunk:
    return Chunk(
        token_ids=planned.token_ids,
        start_position=planned.start_position,
        block_ids=planned.block_ids,
        slots=planned.slots,
        logit_token_count=1 if planned.wants_logits else 0,
    )
