"""A tiny model in a folder, and a controller for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller import ControllerThread, controller_thread
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import strict_runner, worker_thread
from tests.worker.rpc.disturbances import answers_to_all, tiny_config


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 258 tokens with a byte-level tokenizer and a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    """The undisturbed answers to the prompts of the tests of faults."""
    with controller_thread() as running:
        config = tiny_config(running.address)
        runner = strict_runner(tiny_folder, block_count=256)
        with worker_thread(config, runner) as (_, client):
            return answers_to_all(client)


@pytest.fixture
def controller() -> Iterator[ControllerThread]:
    """An in-process controller."""
    with controller_thread() as running:
        yield running
