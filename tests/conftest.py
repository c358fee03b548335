"""Shared test set-up: one thread per process, hypothesis profiles, the optional shared folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read by torch and numpy when they are first imported, which no import above does.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

REPOSITORY_FOLDER = Path(__file__).resolve().parents[1]
SHARED_FOLDER = REPOSITORY_FOLDER.parent / "shared"

# `default` draws the same examples every time, so a red test is red for everybody; `all` explores.
# Choose with pytest's --hypothesis-profile.
settings.register_profile(
    "default",
    max_examples=200,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "all", settings.get_profile("default"), max_examples=5_000, derandomize=False
)
settings.load_profile("default")


@pytest.fixture(scope="session")
def repository_folder() -> Path:
    """The root of the checkout."""
    return REPOSITORY_FOLDER


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder of recorded reference data beside the checkout; skips the test without it."""
    if not SHARED_FOLDER.is_dir():
        pytest.skip(f"no reference data: {SHARED_FOLDER} does not exist")
    return SHARED_FOLDER
