"""Runs forward passes of a loaded model on paged KV."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prefixd.worker.attention.batch import SequenceRows, build_batch
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.model.attention_hook import AttentionCall, AttentionHandler
from prefixd.worker.model.forward import BlockCopy, ForwardPass
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel, call_network
from prefixd.worker.model.lora import LoraRows


class ModelRunner:
    """One model, its KV pool and an attention backend.

    Invariants: a pass either raises before anything is written, or runs whole; block 0 is written
    by padding rows only; passes run one at a time, in the order of the calls.
    """

    def __init__(self, model: LoadedModel, kv: PagedKv, backend: AttentionBackend) -> None:
        assert kv.page_count == len(model.page_geometry), kv.page_count
        self._model = model
        self._kv = kv
        self._backend = backend
        self._places = _places_of(model)

    @property
    def model(self) -> LoadedModel:
        """The model that runs."""
        return self._model

    @property
    def kv(self) -> PagedKv:
        """The pool it reads and writes."""
        return self._kv

    def run(self, forward: ForwardPass) -> Tensor:
        """Copies blocks, computes the pass, stores its KV.

        Args:
            forward: at least one token.

        Returns:
            Logits of ``forward.logit_rows`` in their order: float32 (rows, vocabulary), on the
            model's device.

        Raises:
            AssertionError: the pass contradicts itself or the pool (a caller's fault); nothing was
                written.
        """
        self._check(forward)
        self.copy(forward.copies)
        padding = self._backend.padded_row_count(forward.token_count) - forward.token_count
        logit_count = len(forward.logit_rows)
        logit_padding = self._backend.padded_row_count(logit_count) - logit_count
        with self._model.lora.applied(self._lora_rows(forward)):
            logits = call_network(
                self._model.network,
                self._model.context,
                self._handler(forward, padding),
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
        _check_copies(copies, self._kv)
        if copies:
            self._kv.copy_blocks(
                source_block_ids=[copy.source_block_id for copy in copies],
                target_block_ids=[copy.target_block_id for copy in copies],
                token_counts=[copy.token_count for copy in copies],
            )

    def _handler(self, forward: ForwardPass, padding: int) -> AttentionHandler:
        kv, places = self._kv, self._places
        group_slots, plans = [], []
        for index, group in enumerate(forward.groups):
            # Padding rows store to slot 0, in the block that nobody reads.
            slots = self._tensor(np.pad(group.slots, (0, padding)))
            group_slots.append(slots)
            batch = build_batch(slots, group.sequences, block_size=kv.block_size, group_index=index)
            plans.append(self._backend.plan(batch))

        def attend(call: AttentionCall) -> Tensor:
            group, page = places[call.module]
            kv.store(page, keys=call.keys, values=call.values, slots=group_slots[group])
            return plans[group].attend(call.query, kv.layer(page), call.traits)

        return attend

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

    def _check(self, forward: ForwardPass) -> None:
        count = forward.token_count
        assert count > 0, "a pass computes at least one token"
        assert forward.positions.shape == (count,), "one position per token"
        assert forward.token_ids.min() >= 0, "token ids are not negative"
        assert forward.token_ids.max() < self._model.vocabulary_size, "token id in vocabulary"
        assert forward.positions.max() < self._model.context_token_count_max, "within context"
        logit_rows = forward.logit_rows
        if len(logit_rows):
            assert 0 <= logit_rows.min() <= logit_rows.max() < count, "logit rows are rows"
        for group, rows in zip(self._model.groups, forward.groups, strict=True):
            assert rows.slots.shape == (count,), "one slot per token"
            end = 0
            for sequence in rows.sequences:
                assert sequence.query_start == end, "rows follow one another"
                end += sequence.query_token_count
                _check_sequence(sequence, rows.slots, forward.positions, group, self._kv)
            assert end == count, "every row belongs to a sequence"
        slots = np.concatenate([rows.slots for rows in forward.groups])
        assert len(np.unique(slots)) == len(slots), "no slot is written twice"


def _places_of(model: LoadedModel) -> dict[nn.Module, tuple[int, int]]:
    """KV group and page memory of each attention module."""
    by_layer = {
        layer: (group_index, page)
        for group_index, group in enumerate(model.groups)
        for page, layer in enumerate(group.layer_indices)
    }
    return {module: by_layer[layer] for module, layer in model.layer_indices.items()}


def _check_sequence(
    sequence: SequenceRows,
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    group: KvGroup,
    kv: PagedKv,
) -> None:
    """Its table covers its context with real blocks, and its slots are those of the table."""
    assert sequence.query_token_count > 0, "a sequence has at least one row"
    assert sequence.start_position >= 0, "positions are not negative"
    block_count = -(-sequence.context_token_count // kv.block_size)
    table = np.asarray(sequence.block_ids[:block_count], dtype=np.int64)
    assert len(table) == block_count, f"{len(table)} blocks, {block_count} are read"
    first_read = group.first_read_block(sequence.start_position, block_size=kv.block_size)
    read = table[first_read:]
    assert 0 < read.min() <= read.max() < kv.block_count, "block ids lie in the pool"
    assert table.min() >= 0, "block ids lie in the pool"
    assert table.max() < kv.block_count, "block ids lie in the pool"
    expected_positions = np.arange(sequence.start_position, sequence.context_token_count)
    of_sequence = positions[sequence.query_rows]
    assert np.array_equal(of_sequence, expected_positions), "positions are consecutive"
    expected = table[of_sequence // kv.block_size] * kv.block_size + of_sequence % kv.block_size
    assert np.array_equal(slots[sequence.query_rows], expected), "slots follow the table"


def _check_copies(copies: tuple[BlockCopy, ...], kv: PagedKv) -> None:
    sources = {copy.source_block_id for copy in copies}
    targets = {copy.target_block_id for copy in copies}
    assert len(targets) == len(copies), "a block is the target of one copy"
    assert not sources & targets, "no block is both source and target"
    for copy in copies:
        assert 0 < copy.source_block_id < kv.block_count, copy
        assert 0 < copy.target_block_id < kv.block_count, copy
        assert 0 < copy.token_count <= kv.block_size, copy
