"""What the host does before a pass of decode: from chunks to a work list in static buffers."""

import numpy as np
import torch

from bench.figures import Figure
from bench.measure import Timed, in_turns, ratio_of
from prefixd.kernels.planner import Planner, plan_work
from prefixd.kernels.work_buffers import WorkBuffers, decode_capacity
from prefixd.kernels.work_list import PassLayout, PlanSizes, WorkList
from prefixd.worker.attention.batch import AttentionBatch, pack_tables
from prefixd.worker.attention.triton import layout_of
from prefixd.worker.model.forward import Chunk, flatten

BLOCK_SIZE = 16
CONTEXT_TOKEN_COUNT = 4_096
SHARED_TOKEN_COUNT = 2_048
SEQUENCE_COUNTS = (64, 256)
SIZES = PlanSizes(narrow_row_count=4, wide_row_count=16, whole_row_count=32)
"""Tiles of a model with four query heads per KV head, in 16 bits."""
ROUNDS = 40


class Steps:
    """Decode steps of sequences that share half their context, one token each."""

    def __init__(self, sequence_count: int) -> None:
        shared_count = SHARED_TOKEN_COUNT // BLOCK_SIZE
        own_count = CONTEXT_TOKEN_COUNT // BLOCK_SIZE - shared_count
        self._block_count = 1 + shared_count + sequence_count * own_count
        shared = tuple(range(1, 1 + shared_count))
        own = np.arange(1 + shared_count, self._block_count).reshape(sequence_count, own_count)
        self._tables = [(*shared, *row) for row in own.tolist()]
        self._position = CONTEXT_TOKEN_COUNT - ROUNDS * 2
        capacity = decode_capacity(
            SIZES,
            sequence_count=sequence_count,
            blocks_per_sequence=CONTEXT_TOKEN_COUNT // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
        )
        self._buffers = WorkBuffers(
            capacity,
            block_size=BLOCK_SIZE,
            block_count=self._block_count,
            sizes=SIZES,
            device=torch.device("cpu"),
        )
        self._planner = Planner(SIZES)
        # Where rows are stored is on the device, and nothing that is planned depends on it.
        self._slots = torch.zeros(sequence_count, dtype=torch.int64)

    def advance(self) -> None:
        """The next step is one token on."""
        self._position += 1

    def prepare_planned(self) -> None:
        """As the worker does it: the plan of the last step serves while it is right."""
        layout = self._layout()
        self._load(layout, self._planner.plan(layout))

    def prepare_anew(self) -> None:
        """The same with every plan made from nothing."""
        layout = self._layout()
        self._load(layout, plan_work(layout, SIZES))

    def _layout(self) -> PassLayout:
        position = self._position
        block, offset = divmod(position, BLOCK_SIZE)
        chunks = [
            Chunk((5,), position, (table,), ((table[block] * BLOCK_SIZE + offset,),), 1)
            for table in self._tables
        ]
        sequences = flatten(chunks).groups[0].sequences
        tables = pack_tables(sequences)
        batch = AttentionBatch(self._slots, sequences, tables, BLOCK_SIZE)
        return layout_of(batch, block_count=self._block_count)

    def _load(self, layout: PassLayout, work: WorkList) -> None:
        self._buffers.load(layout, work)


def pass_figures() -> list[Figure]:
    """Measures the host's work per step."""
    torch.set_num_threads(1)
    figures = []
    for count in SEQUENCE_COUNTS:
        steps = Steps(count)
        samples = in_turns(
            {
                "planned": Timed(steps.prepare_planned, prepare=steps.advance),
                "anew": Timed(steps.prepare_anew),
            },
            round_count=ROUNDS,
            warm_up_count=3,
        )
        figures.append(
            Figure(
                f"worker: tables and work list of a decode step, {count} sequences",
                samples["planned"].median_us,
                "us",
                "planned from nothing",
                samples["anew"].median_us,
                ratio_of(samples["planned"], samples["anew"]),
            )
        )
    return figures
