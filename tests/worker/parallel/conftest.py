"""A small model with heads to split, and the options of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 query heads and 4 KV heads."""
    return write_tiny_model(tmp_path_factory.mktemp("four"), kv_head_count=4)


def options(folder: Path, controller_address: str, *more: str) -> list[str]:
    """Options of a small worker over two processes."""
    return [
        *("--model", str(folder), "--device", "cpu", "--tensor-parallel", "2"),
        *("--controller", controller_address, "--pool-name", "split"),
        *("--block-size", "4", "--block-count", "600", *more),
    ]
