"""Executes a step on a model: copies, its forward passes, and what their logits tell."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from prefixd.worker.errors import WorkerBroken
from prefixd.worker.model.forward import BlockCopy, Chunk, ForwardPass, flatten
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.passes import split_passes
from prefixd.worker.reading import LogitRead, LogitReading, read_logits, single_draws
from prefixd.worker.sampling import Draw
from prefixd.worker.step import PassPlan, PlannedChunk


class DeviceLost(WorkerBroken):
    """The GPU answers nothing but errors to this process, for as long as it lives."""


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
            WorkerBroken: no pass will run to its end any more.
            Exception: the pass did not run to its end; what it wrote counts for nothing.
        """
        ...


class Runner(Protocol):
    """A model with its pool, in one process or over several; see `ModelRunner`."""

    @property
    def model(self) -> LoadedModel:
        """The model that runs."""
        ...

    @property
    def kv(self) -> PagedKv:
        """The pool it reads and writes."""
        ...

    @property
    def has_graphs(self) -> bool:
        """Whether passes of decode are recorded, so that they had better run apart."""
        ...

    def run(self, forward: ForwardPass) -> Tensor:
        """Computes a pass; returns its logits."""
        ...

    def draw(self, forward: ForwardPass, draws: Sequence[Draw]) -> Tensor:
        """Computes a pass, and chooses a token for each row of logits."""
        ...

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copies blocks, and computes nothing."""
        ...


class ModelPassRunner:
    """Executes passes on a Hugging Face model."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        """Executes a pass whole and reads its logits; see `PassRunner`."""
        try:
            return self._run(plan, reads)
        except RuntimeError as error:
            _check_device(self._runner.model.device, error)
            raise

    def _run(self, plan: PassPlan, reads: Sequence[LogitRead]) -> list[LogitReading]:
        copies = tuple(
            BlockCopy(copy.source_block_id, copy.target_block_id, copy.token_count)
            for copy in plan.copies
        )
        if not plan.chunks:
            self._runner.copy(copies)
            return []
        chunks = [_chunk(chunk) for chunk in plan.chunks]
        order = self._order(chunks)
        if len(order) == 1:
            return self._run_one(flatten(chunks, copies), chunks, reads)
        return self._run_several(order, chunks, copies, reads)

    def _order(self, chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
        """Indices of the chunks of each pass; where decode is recorded, it runs apart and last."""
        if not self._runner.has_graphs:
            return (tuple(range(len(chunks))),)
        split = split_passes(chunks, block_size=self._runner.kv.block_size)
        return tuple(indices for indices in (split.mixed, split.decode) if indices)

    def _run_one(
        self, forward: ForwardPass, chunks: Sequence[Chunk], reads: Sequence[LogitRead]
    ) -> list[LogitReading]:
        draws = single_draws(reads)
        if draws is not None and len(draws) == len(forward.logit_rows):
            token_ids = self._runner.draw(forward, draws).tolist()
            return [LogitReading(token_ids=((token_id,),)) for token_id in token_ids]
        return read_logits(self._runner.run(forward), _logit_counts(chunks), reads)

    def _run_several(
        self,
        order: Sequence[Sequence[int]],
        chunks: Sequence[Chunk],
        copies: tuple[BlockCopy, ...],
        reads: Sequence[LogitRead],
    ) -> list[LogitReading]:
        """Runs passes one after the other; their logits are read together, once all have run."""
        self._runner.copy(copies)
        logits = [
            self._runner.run(flatten([chunks[index] for index in indices])) for indices in order
        ]
        readers = [index for index, chunk in enumerate(chunks) if chunk.logit_token_count]
        read_of = dict(zip(readers, reads, strict=True))
        executed = [index for indices in order for index in indices if index in read_of]
        readings = read_logits(
            torch.cat(logits),
            [chunks[index].logit_token_count for index in executed],
            [read_of[index] for index in executed],
        )
        reading_of = dict(zip(executed, readings, strict=True))
        return [reading_of[index] for index in readers]


def _check_device(device: torch.device, error: RuntimeError) -> None:
    """Raises DeviceLost where an error was not of one pass: a GPU's context does not recover."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        # CUDA's advice fills further lines.
        reason = str(error).partition("\n")[0]
        raise DeviceLost(f"{device} does not work any more: {reason}") from error


def _logit_counts(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.logit_token_count for chunk in chunks if chunk.logit_token_count]


def _chunk(planned: PlannedChunk) -> Chunk:
    return Chunk(
        token_ids=planned.token_ids,
        start_position=planned.start_position,
        tables=planned.tables,
        slots=planned.slots,
        logit_token_count=planned.logit_token_count,
        lora_name=planned.sequence.lora.name if planned.sequence.lora else "",
    )
