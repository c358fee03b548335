"""Every backend against dense attention in float64, over odd sizes and every trait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch, SequenceRows
from prefixd.worker.attention.registry import (
    UnknownBackend,
    backend_name_for,
    create_backend,
)
from prefixd.worker.attention.seam import LayerTraits
from tests.support.backends import build_batch, every_backend

BLOCK_SIZE = 8
BLOCK_COUNT = 100

# (context tokens, query tokens): one token, around a block's and a key tile's edges, a cold start,
# more query rows than one query tile holds.
SIZES = ((1, 1), (7, 1), (8, 8), (9, 2), (63, 5), (64, 64), (65, 1), (130, 66), (200, 140))


@dataclass(frozen=True)
class Case:
    """A layer's shape and traits."""

    query_head_count: int = 4
    kv_head_count: int = 2
    key_width: int = 16
    value_width: int = 16
    window_token_count: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = {
    "grouped": Case(),
    "one_kv_head": Case(query_head_count=3, kv_head_count=1),
    "one_query_per_kv_head": Case(query_head_count=2),
    "narrow_values": Case(key_width=24, value_width=8),
    "window_of_one": Case(window_token_count=1),
    "window": Case(window_token_count=11),
    "window_of_a_tile": Case(window_token_count=64),
    "softcap": Case(softcap=2.0),
    "sinks": Case(has_sinks=True),
    "everything": Case(window_token_count=70, softcap=3.0, has_sinks=True),
}


class Scene:
    """Sequences of all sizes in one batch, their tables scattered; all other slots hold NaN."""

    def __init__(self, case: Case, *, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * 2.0

        needed = sum(-(-context // block_size) for context, _ in SIZES)
        block_count = max(BLOCK_COUNT, needed + 1)
        blocks = (torch.randperm(block_count - 1, generator=generator) + 1).tolist()
        slot_count = block_count * block_size
        self.sequences: list[SequenceRows] = []
        row = 0
        for context, query in SIZES:
            count = -(-context // block_size)
            table, blocks = tuple(blocks[:count]), blocks[count:]
            self.sequences.append(SequenceRows(row, query, context, table))
            row += query
        self.query = normal(row, case.query_head_count, case.key_width)
        self.keys = torch.full((slot_count, case.kv_head_count, case.key_width), torch.nan)
        self.values = torch.full((slot_count, case.kv_head_count, case.value_width), torch.nan)
        self.traits = LayerTraits(
            scaling=case.key_width**-0.5,
            window_token_count=case.window_token_count,
            softcap=case.softcap,
            sinks=normal(case.query_head_count) if case.has_sinks else None,
        )
        self.expected = torch.empty(row, case.query_head_count, case.value_width)
        for sequence in self.sequences:
            count = sequence.context_token_count
            keys = normal(count, case.kv_head_count, case.key_width)
            values = normal(count, case.kv_head_count, case.value_width)
            slots = self.slots_of(sequence)
            self.keys[slots], self.values[slots] = keys, values
            rows = sequence.query_rows
            self.expected[rows] = dense(self.query[rows], keys, values, self.traits).float()

    def slots_of(self, sequence: SequenceRows) -> list[int]:
        """Slot of every position of the context."""
        size = self.block_size
        return [
            sequence.block_ids[position // size] * size + position % size
            for position in range(sequence.context_token_count)
        ]

    def batch(self, *sequences: SequenceRows, row_count: int) -> AttentionBatch:
        """A batch of some sequences."""
        slots = torch.zeros(row_count, dtype=torch.int64)
        return build_batch(slots, sequences, block_size=self.block_size)

    def attend(self, backend: str, *, padding: int = 0) -> Tensor:
        """All sequences at once."""
        query = torch.cat([self.query, self.query[:1].expand(padding, -1, -1)])
        batch = self.batch(*self.sequences, row_count=query.shape[0])
        plan = create_backend(backend).plan(batch)
        return plan.attend(query, LayerKv(self.keys, self.values), self.traits)


def dense(query: Tensor, keys: Tensor, values: Tensor, traits: LayerTraits) -> Tensor:
    """Float64 attention of the last rows of a sequence over the whole of it."""
    group_size = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group_size, dim=1)
    values = values.double().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * (scores / traits.softcap).tanh()
    queries = torch.arange(len(keys) - len(query), len(keys))[:, None]
    distance = queries - torch.arange(len(keys))
    visible = distance >= 0
    if traits.window_token_count is not None:
        visible &= distance < traits.window_token_count
    weights = torch.where(visible, scores, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if traits.sinks is not None:
        total = total + traits.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, values)


@pytest.mark.parametrize("backend", every_backend())
@pytest.mark.parametrize("case", sorted(CASES))
def test_backend_equals_dense_float64(case: str, backend: str) -> None:
    """All sizes in one batch; nothing is read beside the sequences' own slots."""
    scene = Scene(CASES[case])
    torch.testing.assert_close(scene.attend(backend), scene.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", every_backend())
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_blocks_may_have_any_size(block_size: int, backend: str) -> None:
    """From one slot per block to blocks longer than any context."""
    scene = Scene(CASES["everything"], block_size=block_size)
    torch.testing.assert_close(scene.attend(backend), scene.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", every_backend())
def test_padding_rows_change_nothing(backend: str) -> None:
    """Rows behind the last sequence are neither read nor in the way."""
    scene = Scene(CASES["grouped"])
    padded = scene.attend(backend, padding=3)
    assert padded.shape[0] == scene.query.shape[0] + 3
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:-3], scene.attend(backend), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("backend", every_backend())
def test_consecutive_blocks_equal_scattered_blocks(backend: str) -> None:
    """A table of one run gives what a scattered table with the same content gives."""
    scene = Scene(CASES["grouped"])
    scattered = scene.sequences[-1]
    count = len(scattered.block_ids)
    rows = SequenceRows(
        0, scattered.query_token_count, scattered.context_token_count, tuple(range(3, 3 + count))
    )
    keys, values = torch.full_like(scene.keys, torch.nan), torch.full_like(scene.values, torch.nan)
    keys[scene.slots_of(rows)] = scene.keys[scene.slots_of(scattered)]
    values[scene.slots_of(rows)] = scene.values[scene.slots_of(scattered)]
    plan = create_backend(backend).plan(scene.batch(rows, row_count=rows.query_token_count))
    output = plan.attend(scene.query[scattered.query_rows], LayerKv(keys, values), scene.traits)
    expected = scene.expected[scattered.query_rows]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", sorted(CASES))
def test_strict_rows_do_not_depend_on_the_batch(case: str) -> None:
    """Each row alone gives the bits that it gives among all others."""
    scene = Scene(CASES[case])
    together = scene.attend("strict")
    backend = create_backend("strict")
    for sequence in scene.sequences:
        for offset in range(sequence.query_token_count):
            row = sequence.query_start + offset
            context = sequence.start_position + offset + 1
            alone = SequenceRows(0, 1, context, sequence.block_ids)
            plan = backend.plan(scene.batch(alone, row_count=4))
            query = scene.query[row : row + 1].expand(4, -1, -1)
            output = plan.attend(query, LayerKv(scene.keys, scene.values), scene.traits)
            assert torch.equal(output[0], together[row]), (sequence, offset)


def test_strict_rows_of_a_long_context_do_not_depend_on_the_batch() -> None:
    """Sums over thousands of keys take the same order whatever rows stand behind a row."""
    context, query_count = 3_000, 160
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 3_008, 1, 16, generator=generator)
    query = torch.randn(query_count, 2, 16, generator=generator)
    table = tuple(range(3_008 // BLOCK_SIZE))
    traits = LayerTraits(scaling=0.25)
    backend = create_backend("strict")

    def attend(rows: SequenceRows, query: Tensor) -> Tensor:
        slots = torch.zeros(query.shape[0], dtype=torch.int64)
        plan = backend.plan(build_batch(slots, [rows], block_size=BLOCK_SIZE))
        return plan.attend(query, LayerKv(keys, values), traits)

    together = attend(SequenceRows(0, query_count, context, table), query)
    for row in range(0, query_count, 7):
        alone = SequenceRows(0, 1, context - query_count + row + 1, table)
        assert torch.equal(attend(alone, query[row : row + 1])[0], together[row]), row


def test_strict_pads_to_a_multiple_of_four() -> None:
    """Fewer than four rows would take other matrix kernels."""
    backend = create_backend("strict")
    padded = [backend.padded_row_count(count) for count in (0, 1, 3, 4, 5, 8)]
    assert padded == [0, 4, 4, 4, 8, 8]


def test_unknown_backend_names_the_known_ones() -> None:
    """The error helps to correct the name."""
    with pytest.raises(
        UnknownBackend, match=r"'fast' is unknown; known: reference, strict, torch, triton"
    ):
        create_backend("fast")


@pytest.mark.parametrize(
    ("name", "device_type", "expected"),
    [("auto", "cpu", "torch"), ("auto", "cuda", "triton"), ("strict", "cuda", "strict")],
)
def test_auto_is_the_fastest_backend_of_the_device(
    name: str, device_type: str, expected: str
) -> None:
    """A name that was chosen stays."""
    assert expected == backend_name_for(name, device_type=device_type)
