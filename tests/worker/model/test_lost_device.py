"""What a failed pass on a GPU means: of that pass, or of the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from prefixd.worker.execution import DeviceLost, ModelPassRunner
from prefixd.worker.step import PassPlan

ERROR = "CUDA error: an illegal memory access was encountered\nFor debugging consider more lines"


class FailingRunner:
    """Copies nothing."""

    def __init__(self, device: str) -> None:
        self.model: Any = SimpleNamespace(device=torch.device(device))

    def copy(self, _copies: object) -> NoReturn:
        """Fails."""
        raise RuntimeError(ERROR)


def run_on(device: str) -> None:
    """Runs a step that fails."""
    runner: Any = FailingRunner(device)
    ModelPassRunner(runner).run(PassPlan(), ())


def broken_for_good(_device: torch.device) -> NoReturn:
    """What CUDA answers once a kernel has spoiled its context."""
    raise RuntimeError(ERROR)


def test_a_device_that_fails_for_good_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for it fails, too; the message is one line."""
    monkeypatch.setattr(torch.cuda, "synchronize", broken_for_good)
    with pytest.raises(DeviceLost, match=r"^cuda:0 does not work any more: .*encountered$"):
        run_on("cuda:0")


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_an_error_of_one_pass_stays_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as memory that ran out: the device works."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_on(device)
