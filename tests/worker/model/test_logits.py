"""The runner's logits are those of plain transformers, however the tokens are cut into passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixd.worker.model.loaded import LoadedModel
from tests.support.families import FAMILIES
from tests.support.models import CONFIGS, eager_twin, in_one_group, random_model
from tests.support.passes import CHECKS, Subject

BACKENDS = ("reference", "strict", "torch")
TOKEN_COUNT = 75


def subject_of(model: LoadedModel) -> Subject:
    """A tiny model of one KV group beside its eager twin."""
    return Subject(model, eager_twin(model), TOKEN_COUNT)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest) -> Subject:
    """One model of each kind of attention, of three layers."""
    return subject_of(in_one_group(random_model(CONFIGS[request.param]())))


@pytest.fixture(scope="module")
def smol(smollm2: LoadedModel, smollm2_eager: Any) -> Subject:
    """The real model."""
    return Subject(smollm2, smollm2_eager, 130)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS)
def test_tiny_model_equals_transformers(tiny: Subject, check: str, backend: str) -> None:
    """Every way to cut prompts, on every backend."""
    CHECKS[check](tiny, backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(
    family: str, family_model: Callable[[str], LoadedModel]
) -> None:
    """Every configuration of every family that the guard serves, cut in every way."""
    subject = subject_of(family_model(family))
    for check in CHECKS.values():
        check(subject, "torch")


@pytest.mark.model
@pytest.mark.parametrize("backend", ["strict", "torch"])
@pytest.mark.parametrize("check", CHECKS)
def test_real_model_equals_transformers(smol: Subject, check: str, backend: str) -> None:
    """The same on SmolLM2-135M-Instruct."""
    CHECKS[check](smol, backend)
