"""The small real model, loaded once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.model.fetch import MODEL_DEFAULT, model_folder
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import load_folder
from tests.support.families import FAMILIES
from tests.support.models import CPU, eager_folder, in_one_group, random_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Two threads on two shared cores are slower than one, and bitwise tests count on one."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def family_model() -> Callable[[str], LoadedModel]:
    """Makes the model of a name in FAMILIES, of one KV group; once for all tests.

    It skips the test where the installed transformers lacks the family.
    """
    return cache(lambda family: in_one_group(random_model(FAMILIES[family].config())))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched on the first run ever."""
    return model_folder(MODEL_DEFAULT, report=print)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct with paged attention, float32; any backend may run it."""
    return load_folder(
        smollm2_folder,
        name=MODEL_DEFAULT,
        backend=create_backend("strict"),
        device=CPU,
        dtype=torch.float32,
    )


@pytest.fixture(scope="session")
def smollm2_eager(smollm2_folder: Path) -> Any:
    """The same model as transformers alone runs it, with eager attention."""
    return eager_folder(smollm2_folder)
