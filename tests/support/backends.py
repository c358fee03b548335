"""The attention backends as parameters of tests, and passes for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bench.cascade import WithoutCascade
from prefixd.worker.attention.batch import AttentionBatch, SequenceRows, pack_tables
from prefixd.worker.attention.registry import BACKENDS, create_backend
from prefixd.worker.attention.seam import AttentionBackend

CAN_RUN_TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")


def every_backend() -> list[object]:
    """All names of the registry; triton is skipped where neither a GPU nor its interpreter runs."""
    return [
        pytest.param(name, marks=[needs_triton] if name == "triton" else [])
        for name in sorted(BACKENDS)
    ]


WITHOUT_CASCADE = "torch-without-cascade"


def contract_backends() -> list[object]:
    """What the contract holds for: `every_backend`, and torch without its cascade."""
    return [*every_backend(), WITHOUT_CASCADE]


def contract_backend(name: str) -> AttentionBackend:
    """Makes one of `contract_backends`."""
    return WithoutCascade() if name == WITHOUT_CASCADE else create_backend(name)


def build_batch(
    slots: Tensor, sequences: Sequence[SequenceRows], *, block_size: int
) -> AttentionBatch:
    """A pass whose rows are stored to ``slots``, with the packed tables of its sequences."""
    return AttentionBatch(slots, tuple(sequences), pack_tables(sequences), block_size)
