"""The attention backends as parameters of tests."""

from __future__ import annotations

import os

import pytest
import torch

from prefixd.worker.attention.registry import BACKENDS

CAN_RUN_TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")


def every_backend() -> list[object]:
    """All names of the registry; triton is skipped where neither a GPU nor its interpreter runs."""
    return [
        pytest.param(name, marks=[needs_triton] if name == "triton" else [])
        for name in sorted(BACKENDS)
    ]
