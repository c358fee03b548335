"""The step protocol under faults: lost replies, repeated steps, broken streams, failed steps.

A recorded run of a small engine is the yardstick; each disturbed run must end in its state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from prefixd.controller.core import invariants
from prefixd.v1 import cache_pb2, inspect_pb2, pool_pb2
from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs
from tests.support.driver import Driver, SessionClient, wait_session_ended
from tests.support.toy_engine import Job, ToyEngine

BLOCK_SIZE = 4
DOCUMENT = tuple(range(10, 32))
JOBS = (
    Job("first", (*DOCUMENT, 1, 2, 3), answer_count=5),
    Job("twin", (*DOCUMENT, 1, 2, 3), answer_count=5),
    Job("salted", DOCUMENT, answer_count=2, cache_salt="tenant"),
    Job("second", (*DOCUMENT, 4, 5), answer_count=9, arrival=3, preempted_after=3),
    Job("short", (1, 2), answer_count=3, arrival=4),
    Job("late", (*DOCUMENT, 1, 2, 3), answer_count=7, arrival=12),
)


@dataclass(frozen=True)
class EndState:
    """Everything observable of a pool, its epoch and its secret aside."""

    responses: tuple[bytes, ...]
    answers: dict[str, tuple[int, ...]]
    accounts: bytes
    free_order: tuple[int, ...]
    blocks: tuple[bytes, ...]

    @property
    def published_digests(self) -> frozenset[str]:
        """The digests of all published blocks."""
        blocks = (inspect_pb2.Block.FromString(block) for block in self.blocks)
        return frozenset(block.hash_hex for block in blocks if block.hash_hex)

    @property
    def held_block_count(self) -> int:
        """Blocks that a sequence holds."""
        return inspect_pb2.Pool.FromString(self.accounts).held_block_count


class Link:
    """A driver's link to its pool: a session that can be broken and opened again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._client: SessionClient | None = None

    @property
    def client(self) -> SessionClient:
        """The open session; opens one where there is none."""
        if self._client is None:
            self._client = SessionClient(self.driver.stubs)
            self._client.start(self.driver)
        return self._client

    def send(self, request: cache_pb2.StepRequest) -> None:
        """Sends a step."""
        self.client.send_step(request)

    def receive(self) -> cache_pb2.StepResponse:
        """Waits for the answer of an applied step."""
        response = self.client.receive()
        assert response.WhichOneof("message") == "step", response
        return response.step

    def lose(self) -> None:
        """Breaks the stream, and waits until the controller has noticed."""
        if self._client is not None:
            self._client.cancel()
            self._client = None
            wait_session_ended(self.driver)


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerThread]:
    """One controller for all runs; each run has a pool of its own."""
    with controller_thread() as running:
        yield running


@pytest.fixture(scope="module")
def calls(controller: ControllerThread) -> Iterator[Stubs]:
    """Stubs of the controller."""
    with stubs(controller.address) as opened:
        yield opened


Deliver = Callable[[Link, cache_pb2.StepRequest], cache_pb2.StepResponse]


def deliver(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
    """Sends a step and takes its reply, undisturbed."""
    link.send(request)
    return link.receive()


def run(
    calls: Stubs,
    controller: ControllerThread,
    *,
    deliver_step: Deliver = deliver,
    failing: frozenset[int] = frozenset(),
    block_count: int = 200,
) -> EndState:
    """Runs all jobs in a fresh pool, checking the invariants behind every step."""
    driver = Driver(calls, block_count=block_count, block_size=BLOCK_SIZE)
    pool = controller.server.registry.pool(driver.pool_name)
    link = Link(driver)

    def send(request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        response = deliver_step(link, request)
        controller.call(lambda: invariants.check(pool))
        return response

    engine = ToyEngine(JOBS, send, block_size=BLOCK_SIZE, failing=failing)
    engine.run()
    link.lose()
    state = end_state(calls, driver, engine)
    calls.pool.ReleasePool(pool_pb2.ReleasePoolRequest(**driver.key))
    return state


def end_state(calls: Stubs, driver: Driver, engine: ToyEngine) -> EndState:
    """Reads everything that can be observed of a pool."""
    name = driver.pool_name
    pool = calls.inspect.GetPool(inspect_pb2.GetPoolRequest(pool_name=name)).pool
    for field in ("epoch", "lease_left"):
        pool.ClearField(field)
    blocks = calls.inspect.ListBlocks(
        inspect_pb2.ListBlocksRequest(pool_name=name, page_size=1_000)
    ).blocks
    free_order = calls.inspect.ListFreeBlocks(inspect_pb2.ListFreeBlocksRequest(pool_name=name))
    return EndState(
        responses=tuple(
            response.SerializeToString(deterministic=True) for response in engine.responses
        ),
        answers=engine.answers,
        accounts=pool.SerializeToString(deterministic=True),
        free_order=tuple(free_order.block_ids),
        blocks=tuple(block.SerializeToString(deterministic=True) for block in blocks),
    )


@pytest.fixture(scope="module")
def undisturbed(calls: Stubs, controller: ControllerThread) -> EndState:
    """The end of a run without faults."""
    state = run(calls, controller)
    assert state.held_block_count == 0
    assert set(state.answers) == {job.name for job in JOBS}
    assert state.answers["first"] == state.answers["twin"] == state.answers["late"][:5]
    return state


STEP_COUNT = 22
"""Steps of the undisturbed run: the faults below are tried at each of them."""


def test_recorded_run_has_the_expected_number_of_steps(undisturbed):
    """The faults cover every step of the recorded run."""
    assert len(undisturbed.responses) == STEP_COUNT


def test_every_reply_dropped_ends_in_the_same_state(calls, controller, undisturbed):
    """Each step's reply is lost with its stream; sent again, each step gets the same reply."""

    def drop_reply(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        link.send(request)
        link.receive()
        link.lose()
        return deliver(link, request)

    assert run(calls, controller, deliver_step=drop_reply) == undisturbed


def test_every_step_sent_twice_ends_in_the_same_state(calls, controller, undisturbed):
    """A repeated step gets its kept reply and changes nothing."""

    def send_twice(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        link.send(request)
        link.send(request)
        first, second = link.receive(), link.receive()
        assert first == second
        return second

    assert run(calls, controller, deliver_step=send_twice) == undisturbed


def test_unary_steps_end_in_the_same_state(calls, controller, undisturbed):
    """The unary twin applies the same steps with the same replies, lost ones included."""

    def unary(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        addressed = cache_pb2.StepRequest(**link.driver.key)
        addressed.MergeFrom(request)
        assert calls.cache.Step(addressed) == calls.cache.Step(addressed)
        return calls.cache.Step(addressed)

    assert run(calls, controller, deliver_step=unary) == undisturbed


@pytest.mark.parametrize("step_id", range(1, STEP_COUNT + 1))
@pytest.mark.parametrize("moment", ["before_step", "before_reply", "behind_reply"])
def test_stream_broken_anywhere_ends_in_the_same_state(
    calls, controller, undisturbed, step_id, moment
):
    """A stream that breaks between any two messages is resumed; nothing is lost or done twice."""

    def break_once(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        if request.step_id != step_id:
            return deliver(link, request)
        if moment == "before_step":
            link.lose()
            return deliver(link, request)
        link.send(request)
        if moment == "behind_reply":
            response = link.receive()
            link.lose()
            return response
        link.lose()
        return deliver(link, request)

    assert run(calls, controller, deliver_step=break_once) == undisturbed


def test_client_that_leaves_before_ready_disturbs_nothing(calls, controller, undisturbed):
    """A stream may break before its first message was answered."""

    def leave_early(link: Link, request: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        link.lose()
        early = SessionClient(link.driver.stubs)
        start = cache_pb2.SessionStart(**link.driver.key)
        early.send(cache_pb2.SessionRequest(start=start))
        early.cancel()
        wait_session_ended(link.driver)
        return deliver(link, request)

    assert run(calls, controller, deliver_step=leave_early) == undisturbed


@pytest.mark.parametrize("step_id", range(1, STEP_COUNT + 1))
def test_failed_step_changes_no_answer(calls, controller, undisturbed, step_id):
    """A step that was not executed costs its work and nothing else: same answers, same digests."""
    state = run(calls, controller, failing=frozenset({step_id}))
    assert state.answers == undisturbed.answers
    assert state.held_block_count == 0
    assert state.published_digests == undisturbed.published_digests


@pytest.mark.parametrize("period", [2, 3])
def test_repeated_failures_change_no_answer(calls, controller, undisturbed, period):
    """Answers survive a worker that fails again and again."""
    state = run(calls, controller, failing=frozenset(range(1, 200, period)))
    assert state.answers == undisturbed.answers
    assert state.held_block_count == 0
    assert state.published_digests == undisturbed.published_digests
