"""Passes of decode from recordings: one replay computes the pass, another draws its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.seam import RecordableBackend, StaticPlan
from prefixd.worker.model.forward import ForwardPass
from prefixd.worker.model.graphs import (
    Graph,
    GraphRecorder,
    GraphSize,
    context_token_counts,
    row_counts,
)
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel, call_network
from prefixd.worker.model.paging import paged_handler, places_of
from prefixd.worker.sampling import Draw, DrawField, choose, draw_parameters, draw_rows


class StaticRows:
    """Inputs and results of passes of decode, in memory that never moves.

    Invariants: rows that a pass lacks are token 0 at position 0, stored to slot 0, in the block
    that nobody reads; host memory is written only once what was written before has left it.

    Attributes:
        token_ids, positions: int64 (rows,), inputs.
        group_slots: int64 (rows,) for each KV group, inputs.
        logits: float32 (rows + 1, vocabulary), what a pass computes; the last row is nobody's.
        chosen_token_ids: int64 (rows + 1,), the likeliest tokens, or those drawn; likewise.
        row_indices: int64 (rows,), 0, 1, 2, ...
        drawn_rows: int64 (rows,), which rows are drawn, padded with nobody's row.
        parameters: float64 (fields, rows), how each of them is drawn.
    """

    def __init__(
        self, *, row_count: int, group_count: int, vocabulary_size: int, device: torch.device
    ) -> None:
        is_pinned = device.type == "cuda"
        shape = (2 + group_count, row_count)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_pinned)
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self.token_ids, self.positions, *group_slots = self._inputs.unbind()
        self.group_slots = tuple(group_slots)
        self.logits = torch.zeros((row_count + 1, vocabulary_size), device=device)
        self.chosen_token_ids = torch.zeros(row_count + 1, dtype=torch.int64, device=device)
        self.row_indices = torch.arange(row_count, device=device)
        # Row indices are exact in float64, so one transfer brings all that draws need.
        shape = (1 + len(DrawField), row_count)
        self._host_draws = torch.ones(shape, dtype=torch.float64, pin_memory=is_pinned)
        self._draws = torch.ones(shape, dtype=torch.float64, device=device)
        self.drawn_rows = torch.full((row_count,), row_count, device=device)
        self.parameters = self._draws[1:]

    def load(self, forward: ForwardPass) -> None:
        """Brings the tokens of a pass in, and where they are stored."""
        count, host = forward.token_count, self._host.numpy()
        host[:, count:] = 0
        host[0, :count] = forward.token_ids
        host[1, :count] = forward.positions
        for row, group in zip(host[2:], forward.groups, strict=True):
            row[:count] = group.slots
        self._inputs.copy_(self._host, non_blocking=True)

    def load_draws(self, rows: Sequence[int], draws: Sequence[Draw]) -> None:
        """Brings in which rows are drawn, and how."""
        host = self._host_draws.numpy()
        host[0] = len(self.row_indices)
        host[0, : len(rows)] = rows
        host[1:, : len(rows)] = draw_parameters(draws)
        self._draws.copy_(self._host_draws, non_blocking=True)
        self.drawn_rows.copy_(self._draws[0])


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A recording of a pass, and what is to be loaded before: a plan for each KV group."""

    graph: Graph
    plans: tuple[StaticPlan, ...]


class DecodeGraphs:
    """Recordings of the decode passes of one model, for padded numbers of rows.

    Invariant: what a run returns is valid until the next run.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: PagedKv,
        backend: RecordableBackend,
        recorder: GraphRecorder,
        *,
        row_count_max: int,
        context_token_count_max: int,
    ) -> None:
        """Records nothing yet.

        Args:
            model: that computes the passes.
            kv: the pool; the recordings hold its addresses.
            backend: of attention.
            recorder: of the device's work.
            row_count_max: sequences of a pass at most.
            context_token_count_max: tokens of the longest sequence at most.
        """
        self._model = model
        self._kv = kv
        self._backend = backend
        self._recorder = recorder
        self._row_counts = row_counts(row_count_max)
        self._context_token_counts = context_token_counts(context_token_count_max)
        self._rows = StaticRows(
            row_count=row_count_max,
            group_count=len(model.groups),
            vocabulary_size=model.vocabulary_size,
            device=model.device,
        )
        self._places = places_of(model)
        self._passes: dict[GraphSize, RecordedPass] = {}
        self._draws: dict[int, Graph] = {}

    @property
    def sizes(self) -> tuple[GraphSize, ...]:
        """What is recorded, the largest first: smaller ones then find room in their memory."""
        sizes = [
            GraphSize(row_count, context)
            for row_count in self._row_counts
            for context in self._context_token_counts
        ]
        return tuple(sorted(sizes, reverse=True))

    @property
    def graph_count(self) -> int:
        """Recordings that there are once all are made."""
        return len(self.sizes) + len(self._row_counts)

    def record_largest(self) -> None:
        """Records what takes most memory, to see how much that is."""
        with torch.inference_mode():
            self._passes[self.sizes[0]] = self._record_pass(self.sizes[0])
            self._draws[self._row_counts[-1]] = self._record_draws(self._row_counts[-1])

    def record(self) -> None:
        """Records every size. Stored KV stays what it is.

        Raises:
            RuntimeError: the device cannot record this.
        """
        self.record_passes()
        self.record_draws()

    def record_passes(self) -> None:
        """Records passes alone; tokens are drawn operation by operation until draws are, too.

        Raises:
            RuntimeError: the device cannot record this.
        """
        with torch.inference_mode():
            for size in self.sizes:
                self._passes[size] = self._record_pass(size)

    def record_draws(self) -> None:
        """Records draws.

        Raises:
            RuntimeError: the device cannot record this; none is recorded then.
        """
        with torch.inference_mode():
            self._draws = {
                row_count: self._record_draws(row_count) for row_count in reversed(self._row_counts)
            }

    def fits(self, forward: ForwardPass) -> bool:
        """Whether a recording computes such a pass: one row per sequence, without adapters."""
        return (
            forward.is_decode
            and forward.token_count <= self._row_counts[-1]
            and int(forward.positions.max()) < self._context_token_counts[-1]
        )

    def run(self, forward: ForwardPass, tables: Sequence[NDArray[np.int32]]) -> Tensor:
        """Computes a pass that fits, and stores its KV; its copies are made already.

        Args:
            forward: the pass.
            tables: the packed block tables of each KV group.

        Returns:
            Logits of all rows: float32 (rows, vocabulary).
        """
        size = self._size_of(forward)
        recorded = self._passes[size]
        block_count = -(-size.context_token_count_max // self._kv.block_size)
        self._recorder.wait()
        with torch.inference_mode():
            self._rows.load(forward)
            for index, (plan, group, packed) in enumerate(
                zip(recorded.plans, forward.groups, tables, strict=True)
            ):
                plan.load(
                    AttentionBatch(
                        self._rows.group_slots[index][: size.row_count],
                        group.sequences,
                        # Blocks behind the longest context are not read.
                        packed[:, :block_count],
                        self._kv.block_size,
                        index,
                    )
                )
            self._recorder.mark()
            recorded.graph.replay()
        return self._rows.logits[: forward.token_count]

    def draw(self, draws: Sequence[Draw]) -> Tensor:
        """Chooses a token for each row of the pass that ran last: int64 (rows,)."""
        chosen = self._rows.chosen_token_ids[: len(draws)]
        drawn_rows = [row for row, draw in enumerate(draws) if not draw.options.is_greedy]
        if not drawn_rows:
            return chosen
        if not self._draws:
            return choose(self._rows.logits[: len(draws)], draws)
        with torch.inference_mode():
            self._rows.load_draws(drawn_rows, [draws[row] for row in drawn_rows])
            self._recorder.mark()
            self._draws[self._padded(len(drawn_rows))].replay()
        return chosen

    def _padded(self, row_count: int) -> int:
        return next(count for count in self._row_counts if count >= row_count)

    def _size_of(self, forward: ForwardPass) -> GraphSize:
        context = int(forward.positions.max()) + 1
        return GraphSize(
            self._padded(forward.token_count),
            next(count for count in self._context_token_counts if count >= context),
        )

    def _record_pass(self, size: GraphSize) -> RecordedPass:
        model, rows, block_size = self._model, self._rows, self._kv.block_size
        row_count = size.row_count
        group_slots = [slots[:row_count] for slots in rows.group_slots]
        plans = tuple(
            self._backend.static_plan(
                row_count=row_count,
                blocks_per_sequence=-(-size.context_token_count_max // block_size),
            )
            for _ in model.groups
        )
        for index, (plan, slots) in enumerate(zip(plans, group_slots, strict=True)):
            # All rows are padding.
            nothing = np.zeros((0, 0), np.int32)
            plan.load(AttentionBatch(slots, (), nothing, block_size, index))
        handler = paged_handler(self._places, self._kv, group_slots, plans)
        logits, chosen = rows.logits[:row_count], rows.chosen_token_ids[:row_count]

        def run() -> None:
            computed = call_network(
                model.network,
                model.context,
                handler,
                token_ids=rows.token_ids[:row_count],
                positions=rows.positions[:row_count],
                logit_rows=rows.row_indices[:row_count],
            )
            logits.copy_(computed)
            chosen.copy_(logits.argmax(dim=-1))

        return RecordedPass(self._recorder.record(run), plans)

    def _record_draws(self, row_count: int) -> Graph:
        rows = self._rows

        def run() -> None:
            drawn_rows = rows.drawn_rows[:row_count]
            drawn = draw_rows(rows.logits[drawn_rows], rows.parameters[:, :row_count])
            rows.chosen_token_ids.index_copy_(0, drawn_rows, drawn)

        return self._recorder.record(run)
