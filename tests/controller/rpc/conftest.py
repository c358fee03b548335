"""A controller of its own for each test."""

from collections.abc import Iterator

import pytest

from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs


@pytest.fixture
def controller() -> Iterator[ControllerThread]:
    """An in-process controller whose clock only the test moves."""
    with controller_thread() as running:
        yield running


@pytest.fixture
def calls(controller: ControllerThread) -> Iterator[Stubs]:
    """Stubs of the controller."""
    with stubs(controller.address) as opened:
        yield opened
