"""Steps planned ahead of their execution: four in flight, lost together and failed together."""

from collections.abc import Iterator

import pytest

from prefixd.controller.core import invariants
from prefixd.v1 import cache_pb2, inspect_pb2
from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs
from tests.support.driver import (
    Driver,
    close_entry,
    extend_entry,
    open_entry,
    refused,
    session,
    wait_session_ended,
)

PROMPT = tuple(range(40))
IN_FLIGHT = 4
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerThread]:
    """One controller for all tests; each registers the pool afresh."""
    with controller_thread() as running:
        yield running


@pytest.fixture(scope="module")
def calls(controller: ControllerThread) -> Iterator[Stubs]:
    """Stubs of the controller."""
    with stubs(controller.address) as opened:
        yield opened


def planned_ahead(driver: Driver) -> list[cache_pb2.StepRequest]:
    """Four steps that nobody has executed: a prompt in three chunks, and its twin behind it."""
    entries = [
        open_entry(1, PROMPT, schedule_token_count_max=10),
        extend_entry(1, known=40, scheduled=10, schedule_token_count_max=10),
        extend_entry(1, known=40, scheduled=20),
        open_entry(2, PROMPT),
    ]
    return [
        driver.request(entry, step_id=index + 1, executed_step_id=0)
        for index, entry in enumerate(entries)
    ]


def published(calls: Stubs) -> set[str]:
    """The digests of all published blocks."""
    blocks = calls.inspect.ListBlocks(
        inspect_pb2.ListBlocksRequest(pool_name="pool", page_size=1_000)
    ).blocks
    return {
        block.hash_hex for block in blocks if block.content == inspect_pb2.BLOCK_CONTENT_PUBLISHED
    }


@pytest.mark.parametrize("answered", range(IN_FLIGHT + 1))
def test_replies_lost_together_come_again_together(calls, answered):
    """A stream that breaks with replies outstanding is resumed; each step gets its first reply."""
    driver = Driver(calls)
    requests = planned_ahead(driver)
    undisturbed = [calls.cache.Step(request) for request in requests]

    driver = Driver(calls)
    requests = planned_ahead(driver)
    with session(driver) as client:
        for request in requests:
            client.send_step(request)
        first = [client.receive().step for _ in range(answered)]
    wait_session_ended(driver)
    with session(driver) as client:
        for request in requests:
            client.send_step(request)
        again = [client.receive().step for _ in requests]
    assert first == undisturbed[:answered]
    assert again == undisturbed


def test_s10_twin_matches_what_earlier_steps_schedule(calls):
    """S10: a prompt planned behind its twin takes its blocks as pending, before any step ran."""
    driver = Driver(calls)
    replies = [calls.cache.Step(request) for request in planned_ahead(driver)]
    twin = replies[3].outcomes[0].open
    assert (twin.published_token_count, twin.pending_token_count) == (0, 36)
    assert published(calls) == set()


def test_steps_become_published_as_they_are_confirmed(calls):
    """Each confirmation publishes the whole blocks of its steps, no more."""
    driver = Driver(calls)
    for request in planned_ahead(driver):
        calls.cache.Step(request)
    counts = []
    for executed in range(1, IN_FLIGHT + 1):
        calls.cache.Step(driver.request(step_id=IN_FLIGHT + executed, executed_step_id=executed))
        counts.append(len(published(calls)))
    assert counts == [2, 5, 10, 10]


@pytest.mark.parametrize("executed", range(IN_FLIGHT))
def test_steps_failed_together_are_cut_together(controller, calls, executed):
    """When a step fails those behind it fail too: all are cut to what was written before."""
    undisturbed = published_without_failure(calls)
    driver = Driver(calls)
    pool = controller.server.registry.pool("pool")
    for request in planned_ahead(driver):
        calls.cache.Step(request)
    driver.applied_step_id = IN_FLIGHT
    report = driver.step(
        executed_step_id=executed, failed_step_id=executed + 1, failed_step_id_last=IN_FLIGHT
    )
    controller.call(lambda: invariants.check(pool))
    written = (0, 8, 20, 40)[executed]
    cuts = {cut.handle: cut.scheduled_count for cut in report.cut_sequences}
    # What is whole and written stays; a partly filled block's tokens are computed again.
    assert cuts[2] == min(written, 36)
    assert cuts.get(1, 40) == written
    again = [
        extend_entry(handle, known=40, scheduled=scheduled) for handle, scheduled in cuts.items()
    ]
    driver.step(*again, executed_step_id=IN_FLIGHT + 1)
    driver.step(close_entry(1), close_entry(2))
    driver.step()
    controller.call(lambda: invariants.check(pool))
    assert published(calls) == undisturbed
    accounts = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name="pool")).pool
    assert (accounts.held_block_count, accounts.pending_block_count) == (0, 0)


def published_without_failure(calls: Stubs) -> set[str]:
    """What the four steps publish where none fails."""
    driver = Driver(calls)
    for request in planned_ahead(driver):
        calls.cache.Step(request)
    driver.applied_step_id = IN_FLIGHT
    driver.step(close_entry(1), close_entry(2))
    return published(calls)


@pytest.mark.parametrize(
    ("first", "last"), [(1, 3), (2, 4), (0, 4), (1, 5)], ids=["short", "gap", "half", "long"]
)
def test_report_of_failed_steps_must_fit_the_log(calls, first, last):
    """Failed steps begin behind the executed ones and end with the last applied."""
    driver = Driver(calls)
    for request in planned_ahead(driver):
        calls.cache.Step(request)
    driver.applied_step_id = IN_FLIGHT
    error = refused(
        lambda: driver.step(executed_step_id=0, failed_step_id=first, failed_step_id_last=last)
    )
    assert error.reason == "FIELD_INVALID"


def test_confirmed_reply_is_kept_no_more(calls):
    """A step that was confirmed is no longer answered again: its reply has done its work."""
    driver = Driver(calls)
    request = driver.request(open_entry(1, [1]))
    driver.step(open_entry(1, [1]))
    driver.step()
    error = refused(lambda: calls.cache.Step(request))
    assert (error.reason, error.metadata["expected_step_id"]) == ("STEP_OUT_OF_ORDER", "3")
