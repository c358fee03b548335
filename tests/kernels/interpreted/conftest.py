"""Kernels run on the CPU, in triton's interpreter.

Triton decides when a kernel is defined whether it will be interpreted, for the whole process. So
these tests have a process of their own, which tests/kernels/test_interpreted.py starts; by hand:

    TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def repaired_interpreter() -> Iterator[None]:
    """The interpreter with exact casts and products."""
    from tests.kernels.interpreted.shim import repair

    with pytest.MonkeyPatch.context() as patch:
        repair(patch)
        yield
