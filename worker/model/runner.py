"""Runs forward passes of a loaded model on paged KV."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixd.worker.attention.batch import AttentionBatch, pack_tables
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.model.attention_hook import AttentionHandler
from prefixd.worker.model.forward import BlockCopy, ForwardPass
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel, call_network
from prefixd.worker.model.lora import LoraRows
from prefixd.worker.model.paging import paged_handler, places_of
from prefixd.worker.model.pass_check import check_copies, check_pass
from prefixd.worker.sampling import Draw, choose


class ModelRunner:
    """One model, its KV pool and an attention backend.

    Invariants: a pass either raises before anything is written, or runs whole; block 0 is written
    by padding rows only; passes run one at a time, in the order of the calls.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: PagedKv,
        backend: AttentionBackend,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Makes a runner.

        Args:
            model: that computes.
            kv: the pool.
            backend: of attention.
            graphs: recorded passes of decode, of this model and pool; None: all run one by one.
        """
        assert kv.page_count == len(model.page_geometry), kv.page_count
        self._model = model
        self._kv = kv
        self._backend = backend
        self._graphs = graphs
        self._places = places_of(model)

    @property
    def model(self) -> LoadedModel:
        """The model that runs."""
        return self._model

    @property
    def kv(self) -> PagedKv:
        """The pool it reads and writes."""
        return self._kv

    @property
    def has_graphs(self) -> bool:
        """Whether passes of decode are recorded, so that they had better run apart."""
        return self._graphs is not None

    def run(self, forward: ForwardPass) -> Tensor:
        """Copies blocks, computes the pass, stores its KV.

        Args:
            forward: at least one token.

        Returns:
            Logits of ``forward.logit_rows`` in their order: float32 (rows, vocabulary), on the
            model's device; valid until the next pass.

        Raises:
            AssertionError: the pass contradicts itself or the pool (a caller's fault); nothing was
                written.
        """
        with self._on_device():
            tables = self._begin(forward)
            if self._graphs is None or not self._graphs.fits(forward):
                return self._compute(forward, tables)
            logits = self._graphs.run(forward, tables)
            if len(forward.logit_rows) == forward.token_count:
                return logits
            return logits[self._tensor(forward.logit_rows)]

    def draw(self, forward: ForwardPass, draws: Sequence[Draw]) -> Tensor:
        """Does what `run` does, and chooses a token for each row of logits.

        Args:
            forward: at least one token.
            draws: one for each of ``forward.logit_rows``.

        Returns:
            Token ids, int64 (logit rows,), on the model's device; valid until the next pass.

        Raises:
            AssertionError: as `run`.
        """
        assert len(draws) == len(forward.logit_rows), "a draw for each row of logits"
        with self._on_device():
            tables = self._begin(forward)
            if self._graphs is None or not self._graphs.fits(forward):
                return choose(self._compute(forward, tables), draws)
            logits = self._graphs.run(forward, tables)
            if len(draws) == forward.token_count:
                return self._graphs.draw(draws)
            return choose(logits[self._tensor(forward.logit_rows)], draws)

    def _begin(self, forward: ForwardPass) -> list[NDArray[np.int32]]:
        """Checks a pass and makes its copies; returns the packed tables of each KV group."""
        tables = [pack_tables(group.sequences) for group in forward.groups]
        check_pass(forward, tables, self._model, self._kv)
        self.copy(forward.copies)
        return tables

    def _compute(self, forward: ForwardPass, tables: Sequence[NDArray[np.int32]]) -> Tensor:
        padding = self._backend.padded_row_count(forward.token_count) - forward.token_count
        logit_count = len(forward.logit_rows)
        logit_padding = self._backend.padded_row_count(logit_count) - logit_count
        with self._model.lora.applied(self._lora_rows(forward)):
            logits = call_network(
                self._model.network,
                self._model.context,
                self._handler(forward, tables, padding),
                token_ids=self._tensor(np.pad(forward.token_ids, (0, padding))),
                positions=self._tensor(np.pad(forward.positions, (0, padding))),
                logit_rows=self._tensor(np.pad(forward.logit_rows, (0, logit_padding))),
            )
        return logits[:logit_count].float()

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Executes block copies alone, for a step that computes nothing.

        Raises:
            AssertionError: a copy contradicts the pool or another copy; nothing was written.
        """
        check_copies(copies, self._kv)
        if not copies:
            return
        with self._on_device():
            self._kv.copy_blocks(
                source_block_ids=[copy.source_block_id for copy in copies],
                target_block_ids=[copy.target_block_id for copy in copies],
                token_counts=[copy.token_count for copy in copies],
            )

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels start on the device of their thread, which need not be the model's."""
        device = self._model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _handler(
        self, forward: ForwardPass, tables: Sequence[NDArray[np.int32]], padding: int
    ) -> AttentionHandler:
        group_slots, plans = [], []
        for index, (group, packed) in enumerate(zip(forward.groups, tables, strict=True)):
            # Padding rows store to slot 0, in the block that nobody reads.
            slots = self._tensor(np.pad(group.slots, (0, padding)))
            batch = AttentionBatch(slots, group.sequences, packed, self._kv.block_size, index)
            group_slots.append(slots)
            plans.append(self._backend.plan(batch))
        return paged_handler(self._places, self._kv, group_slots, plans)

    def _lora_rows(self, forward: ForwardPass) -> tuple[LoraRows, ...]:
        """The rows of each adapter that some sequence goes through."""
        rows: dict[str, list[int]] = {}
        for name, sequence in zip(forward.lora_names, forward.groups[0].sequences, strict=True):
            if name:
                of_sequence = range(forward.token_count)[sequence.query_rows]
                rows.setdefault(name, []).extend(of_sequence)
        return tuple(self._lora_rows_of(name, of_name) for name, of_name in rows.items())

    def _lora_rows_of(self, name: str, rows: list[int]) -> LoraRows:
        padding = self._backend.padded_row_count(len(rows)) - len(rows)
        padded = self._tensor(np.array(rows + rows[:1] * padding, dtype=np.int64))
        return LoraRows(name, padded, len(rows))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
