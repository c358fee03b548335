"""Hints about later use (S20), as people and clients give them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prefixd.clients import (
    CallRefused,
    Connection,
    Continuation,
    ControllerClient,
    GenerateOptions,
    RetentionHint,
    WorkerClient,
)
from prefixd.clients.cli.main import run
from prefixd.worker.config import WorkerConfig
from tests.support.controller import ControllerThread, controller_thread, stubs
from tests.support.tiny_model import write_tiny_model
from tests.support.worker import strict_runner, wait_idle, worker_thread


@dataclass(frozen=True)
class Place:
    """Where controller and worker listen."""

    controller: ControllerThread
    worker_address: str


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A worker whose pool heeds hints."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with controller_thread() as controller:
        config = WorkerConfig(
            controller=controller.address, pool_name="tiny", eviction_policy="retention"
        )
        runner = strict_runner(folder, block_count=256)
        with worker_thread(config, runner) as (worker, _):
            yield Place(controller, worker.address)


def evictable(place: Place) -> tuple[int, ...]:
    """Waits until nothing is held, and returns the cached blocks in the order in which they go."""
    with stubs(place.controller.address) as control:
        pool = wait_idle(control, "tiny")
    with ControllerClient(Connection(place.controller.address)) as client:
        return client.free_blocks("tiny").block_ids[pool.free_block_count :]


def test_s20_a_client_says_what_is_over_and_what_is_worth_more(place: Place) -> None:
    """S20: the first prompt has priority, the last one is over, the order follows; nonsense is
    refused."""
    hints = (RetentionHint(priority=3), None, RetentionHint(Continuation.OVER))
    with WorkerClient(Connection(place.worker_address)) as client:
        orders = []
        for letter, hint in zip("abc", hints, strict=True):
            client.generate(
                letter * 20,
                GenerateOptions(
                    token_count_max=2, ignore_end_of_sequence=True, retention_hint=hint
                ),
            )
            orders.append(evictable(place))
        with pytest.raises(CallRefused) as refused:
            client.generate("x", GenerateOptions(retention_hint=RetentionHint(priority=8)))
    first, second, _ = (
        set(later) - set(before) for before, later in zip(((), *orders), orders, strict=False)
    )
    assert refused.value.reason == "FIELD_INVALID"
    count = len(first)
    assert set(orders[-1][-count:]) == first
    assert set(orders[-1][-2 * count : -count]) == second


def test_s20_the_command_line_hands_hints_on(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """S20: `--continuation`, `--priority` and `--retention-ms`; `pools` shows the policy."""
    worker = ["-n", "2", "--worker", place.worker_address]
    assert run(["generate", "a" * 20, "--priority", "1", "--retention-ms", "60000", *worker]) == 0
    kept = evictable(place)
    assert run(["generate", "b" * 20, "--continuation", "expected", *worker]) == 0
    evictable(place)
    assert run(["generate", "c" * 20, "--continuation", "over", *worker]) == 0
    assert evictable(place)[-len(kept) :] == kept
    assert run(["generate", "c", "--continuation", "perhaps", *worker]) == 2
    capsys.readouterr()
    assert run(["pools", "--controller", place.controller.address]) == 0
    assert "retention" in capsys.readouterr().out
