"""Steps of arbitrary content: whatever a client sends gets a typed answer and breaks nothing."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.controller.core import invariants
from prefixd.v1 import cache_pb2, types_pb2
from tests.support.controller import ControllerThread, Stubs, controller_thread, stubs
from tests.support.driver import Driver, call_error

OUR_FAULT = {"INTERNAL_FAILURE", "INVARIANT_BROKEN"}

EXTREMES = [-1, -(2**31), 2**31 - 1, 4_194_304, 4_194_305]


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value that is usual nine times of ten, so that many steps get as far as the state."""
    return st.integers(0, 9).flatmap(lambda drawn: odd if drawn == 7 else usual)


handles = st.integers(0, 3)
counts = mostly(st.integers(0, 8), st.sampled_from(EXTREMES))
token_ids = st.lists(st.integers(0, 2), max_size=9)
prompts = mostly(st.lists(st.integers(0, 2), min_size=1, max_size=12), token_ids)
names = mostly(st.sampled_from(["a", "b", "é"]), st.sampled_from(["", "x" * 257]))


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A field that may be absent."""
    return st.none() | strategy


identities = st.builds(
    types_pb2.Identity,
    lora=optional(st.builds(types_pb2.LoraAdapter, name=names, path=names, version=names)),
    multimodal_items=st.lists(
        st.builds(
            types_pb2.MultimodalItem,
            identifier=names,
            offset=counts,
            token_count=counts,
        ),
        max_size=2,
    ),
    cache_salt=names,
    prompt_embeds_digests=st.lists(st.sampled_from([b"", b"d" * 32, b"e" * 33]), max_size=3),
)
opens = st.builds(
    cache_pb2.OpenEntry,
    handle=handles,
    token_ids=prompts,
    sequence_id=names,
    identity=optional(identities),
    schedule_token_count_max=optional(counts),
    lookahead_slot_count=st.just(0) | counts,
    must_fit_token_count=st.just(0) | counts,
    preemption_count=st.just(0) | counts,
    skip_cache_read=st.booleans(),
    await_token_count_min=st.just(0) | counts,
)
extends = st.builds(
    cache_pb2.ExtendEntry,
    handle=handles,
    known_count_before=counts,
    scheduled_count_before=counts,
    token_ids=token_ids,
    schedule_token_count_max=optional(counts),
    lookahead_slot_count=st.just(0) | counts,
    rollback_to_token_count=optional(counts),
    draft_token_count=st.just(0) | counts,
)
rows = st.lists(
    st.tuples(handles, counts, counts, st.lists(st.integers(0, 2), max_size=2)),
    max_size=3,
    unique_by=lambda row: row[0],
).map(
    lambda drawn: cache_pb2.DecodeEntry(
        handles=[row[0] for row in drawn],
        scheduled_count_before=[row[1] for row in drawn],
        known_count_before=[row[2] for row in drawn],
        token_counts=[len(row[3]) for row in drawn],
        token_ids=[token_id for row in drawn for token_id in row[3]],
    )
)
columns = st.lists(counts, max_size=3)
ragged = st.builds(
    cache_pb2.DecodeEntry,
    handles=st.lists(handles, max_size=3),
    scheduled_count_before=columns,
    known_count_before=columns,
    token_counts=columns,
    token_ids=token_ids,
)
decodes = mostly(rows, ragged)
forks = st.builds(
    cache_pb2.ForkEntry,
    parent_handle=handles,
    child_handle=handles,
    child_sequence_id=names,
    token_count=counts,
)
closes = st.builds(
    cache_pb2.CloseEntry, handle=handles, reason=mostly(st.integers(1, 3), st.integers(0, 4))
)
entries = st.one_of(
    st.builds(cache_pb2.StepEntry, open=opens),
    st.builds(cache_pb2.StepEntry, extend=extends),
    st.builds(cache_pb2.StepEntry, decode=decodes),
    st.builds(cache_pb2.StepEntry, close=closes),
    mostly(
        st.builds(cache_pb2.StepEntry, open=opens),
        st.builds(cache_pb2.StepEntry, fork=forks) | st.just(cache_pb2.StepEntry()),
    ),
)
odd_ids = st.sampled_from([-1, 2, 2**63 - 1])
steps = st.builds(
    cache_pb2.StepRequest,
    entries=st.lists(entries, max_size=4),
    token_budget=optional(counts),
    step_id=mostly(st.just(0), odd_ids),
    executed_step_id=mostly(st.just(0), odd_ids),
)


@pytest.fixture(scope="module")
def controller() -> Iterator[ControllerThread]:
    """One controller for all examples; each has a pool of its own."""
    with controller_thread() as running:
        yield running


@pytest.fixture(scope="module")
def calls(controller: ControllerThread) -> Iterator[Stubs]:
    """Stubs of the controller."""
    with stubs(controller.address) as opened:
        yield opened


@settings(max_examples=settings.default.max_examples // 2)
@given(sent=st.lists(st.tuples(steps, st.sampled_from("efe")), min_size=1, max_size=12))
def test_no_step_breaks_a_pool(controller, calls, sent):
    """Any step is applied or refused with a reason that is the caller's to mend."""
    driver = Driver(calls, block_count=8, block_size=2)
    pool = controller.server.registry.pool("pool")
    for step, fate in sent:
        request = driver.request()
        if fate == "f" and driver.applied_step_id:
            request.executed_step_id -= 1
            request.failed_step_id = request.failed_step_id_last = driver.applied_step_id
        request.MergeFrom(step)
        reasons = set()
        try:
            calls.cache.Step(request)
            driver.applied_step_id = pool.applied_step_id
        except grpc.RpcError as error:
            reasons = {call_error(error).reason}
        assert not reasons & OUR_FAULT
        controller.call(lambda: invariants.check(pool))
