"""Plans for several KV groups in the scheduler, against hand-written answers (S23)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixd.v1 import cache_pb2, types_pb2
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.plan_check import PlanInvalid, PoolShape
from prefixd.worker.rpc.step_messages import step_answer
from prefixd.worker.scheduler import Scheduler
from prefixd.worker.sequence import Sequence
from prefixd.worker.step import (
    Copy,
    Cut,
    Decoded,
    Extended,
    Forked,
    Freed,
    GroupPlan,
    Opened,
    Plan,
    Remap,
    StepAnswer,
    StepDraft,
)

GROUPS = (KvGroup(None, (1,)), KvGroup(6, (0,)))
SHAPE = PoolShape(block_count=41, block_size=4, groups=GROUPS)
TOKEN_COUNT = 15
HANDLE = 1
# Positions 12 to 14 behind a match of 12: a row at 12 reads from position 7 on.
OPENED = Plan(
    HANDLE,
    cached_end=12,
    scheduled_start=12,
    scheduled_end=15,
    groups=(
        GroupPlan(0, (1, 2, 3, 4), (16, 17, 18)),
        GroupPlan(0, (0, 12, 13, 14), (56, 57, 58)),
    ),
)


@pytest.fixture
def scheduler() -> Scheduler:
    """Room for four sequences."""
    limits = SchedulerLimits(chunk_token_count_max=8, running_sequence_count_max=4, token_budget=32)
    return Scheduler(SHAPE, limits)


@pytest.fixture
def sequence(scheduler: Scheduler) -> Sequence:
    """A prompt that waits."""
    one = Sequence("one", list(range(TOKEN_COUNT)), prompt_token_count=TOKEN_COUNT, arrival=1)
    scheduler.add(one)
    return one


@pytest.fixture
def running(scheduler: Scheduler, sequence: Sequence) -> Sequence:
    """The same, computed up to its first own token."""
    scheduler.apply(scheduler.draft(), opened(OPENED))
    sequence.token_ids.append(70)
    return sequence


def opened(plan: Plan) -> StepAnswer:
    """The answer that opens with the plan."""
    return StepAnswer(1, opens=(Opened(plan, 12),), available_block_count=20)


def freed(group_index: int, block_index: int, block_id: int) -> Freed:
    """A block of the sequence that was let go."""
    return Freed(HANDLE, group_index, block_index, block_id)


@pytest.mark.parametrize(("chunk", "block_count"), [(1, 40 - 3), (8, 40 - 5), (500, 20)])
def test_s23_demand_sums_over_groups(chunk: int, block_count: int) -> None:
    """S23: of 40 blocks the window takes what one chunk needs, or half of all."""
    assert SHAPE.token_count_max(chunk_token_count_max=chunk) == block_count * 4


def test_s23_each_group_has_its_table_and_slots(scheduler: Scheduler, sequence: Sequence) -> None:
    """S23: the window group's match begins with a place that it need not hold."""
    applied = scheduler.apply(scheduler.draft(), opened(OPENED))

    (chunk,) = applied.pass_plan.chunks
    assert chunk.tables == ((1, 2, 3, 4), (0, 12, 13, 14))
    assert chunk.slots == ((16, 17, 18), (56, 57, 58))
    assert sequence.held_block_count == 7


def test_s23_decode_row_frees_before_it_appends(scheduler: Scheduler, running: Sequence) -> None:
    """S23: position 15 reads from 10 on, position 16 from 11; at 17 the second block may go."""
    scheduler.apply(scheduler.draft(), StepAnswer(2, Decoded(((0,), (0,)))))
    running.token_ids.append(71)
    scheduler.apply(scheduler.draft(), StepAnswer(3, Decoded(((5,), (15,)))))
    running.token_ids.append(72)
    answer = StepAnswer(4, Decoded(((0,), (0,)), freed=(freed(1, 1, 12),)))
    applied = scheduler.apply(scheduler.draft(), answer)

    (chunk,) = applied.pass_plan.chunks
    assert chunk.tables == ((1, 2, 3, 4, 5), (0, 0, 13, 14, 15))
    assert chunk.slots == ((5 * 4 + 1,), (15 * 4 + 1,))


def test_s23_extend_frees_before_it_appends(scheduler: Scheduler, running: Sequence) -> None:
    """S23: three tokens at once, of which the first reads from position 10 on."""
    running.token_ids += [71, 72]
    plan = Plan(
        HANDLE,
        cached_end=15,
        scheduled_start=15,
        scheduled_end=18,
        groups=(
            GroupPlan(4, (5,), (19, 20, 21)),
            GroupPlan(4, (15,), (59, 60, 61)),
        ),
        freed=(freed(1, 1, 12),),
    )
    scheduler.apply(scheduler.draft(), StepAnswer(2, extends=(Extended(plan),)))
    assert running.tables == ([1, 2, 3, 4, 5], [0, 0, 13, 14, 15])


def test_s16_fork_shares_what_each_group_holds(scheduler: Scheduler, running: Sequence) -> None:
    """S16, S23: the copies of the partial block say whose group they are of."""
    child = Sequence("child", [*range(TOKEN_COUNT), 71], TOKEN_COUNT, arrival=1)
    scheduler.branch(child, parent=running, token_count=TOKEN_COUNT)
    draft = scheduler.draft()
    copies = (
        Copy(4, 21, 3, handle=HANDLE, block_index=3),
        Copy(14, 22, 3, handle=HANDLE, block_index=3, group_index=1),
    )
    answer = StepAnswer(
        2,
        Decoded(((0, 0), (0, 0)), copies=copies),
        forks=(Forked(((1, 2, 3, 4), (0, 12, 13, 14))),),
    )
    scheduler.apply(draft, answer)
    assert running.tables == ([1, 2, 3, 21], [0, 12, 13, 22])
    assert child.tables == ([1, 2, 3, 4], [0, 12, 13, 14])


def test_s15_remap_and_s22_cut_reach_their_group(scheduler: Scheduler, running: Sequence) -> None:
    """S15, S22, S23: a remap names its group; a cut shortens every table."""
    remap = Remap(HANDLE, block_index=2, old_block_id=13, new_block_id=30, group_index=1)
    cut = Cut(HANDLE, known_count=12, scheduled_count=12)
    draft = scheduler.draft()
    answer = StepAnswer(2, Decoded(((0,), (0,)), {0: "TOKEN_BUDGET"}), cuts=(cut,), remaps=(remap,))
    scheduler.apply(draft, answer)
    assert running.tables == ([1, 2, 3], [0, 12, 30])


def _group(index: int, **changes: object) -> Plan:
    parts = list(OPENED.groups)
    parts[index] = replace(parts[index], **changes)  # type: ignore[arg-type]
    return replace(OPENED, groups=tuple(parts))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(replace(OPENED, groups=OPENED.groups[:1]), id="a group is missing"),
        pytest.param(_group(0, block_ids=(0, 2, 3, 4)), id="full attention with an empty place"),
        pytest.param(_group(1, block_ids=(0, 0, 13, 14)), id="an empty place in the window"),
        pytest.param(_group(1, block_ids=(0, 12, 13, 41)), id="a block outside the pool"),
        pytest.param(_group(1, slots=(56, 57, 59)), id="a slot outside its block"),
        pytest.param(_group(1, start_block=1), id="a table that begins later"),
        pytest.param(replace(OPENED, freed=(freed(1, 0, 12),)), id="freed before it was held"),
    ],
)
def test_s23_plan_that_contradicts_a_group_is_not_executed(
    scheduler: Scheduler, sequence: Sequence, plan: Plan
) -> None:
    """S23: every group is checked as the only one would be."""
    draft = scheduler.draft()
    assert [opening.sequence for opening in draft.opens] == [sequence]
    with pytest.raises(PlanInvalid):
        scheduler.apply(draft, opened(plan))


@pytest.mark.parametrize(
    "decoded",
    [
        pytest.param(Decoded(((0,),)), id="a column is missing"),
        pytest.param(Decoded(((0,), (15,))), id="a block that one group does not need"),
        pytest.param(Decoded(((0,), (0,)), freed=(freed(1, 2, 13),)), id="freed in the window"),
        pytest.param(Decoded(((0,), (0,)), freed=(freed(0, 0, 1),)), id="freed of full attention"),
        pytest.param(Decoded(((0,), (0,)), freed=(freed(1, 1, 13),)), id="freed another block"),
        pytest.param(Decoded(((0,), (0,)), freed=(freed(2, 1, 12),)), id="freed of no group"),
        pytest.param(Decoded(((0,), (0,)), freed=(Freed(9, 1, 1, 12),)), id="freed for nobody"),
    ],
)
def test_s23_row_that_contradicts_a_group_is_not_executed(
    scheduler: Scheduler, running: Sequence, decoded: Decoded
) -> None:
    """S23: what a row reads may not have been freed."""
    draft = scheduler.draft()
    assert [row.sequence for row in draft.decode_rows] == [running]
    with pytest.raises(PlanInvalid):
        scheduler.apply(draft, StepAnswer(2, decoded))


def _decode_message() -> cache_pb2.EntryOutcome:
    outcome = cache_pb2.EntryOutcome()
    for block_id in (5, 15):
        outcome.decode.new_blocks.add(block_ids=[block_id])
    outcome.decode.freed_blocks.add(handle=HANDLE, group_index=1, block_index=1, block_id=12)
    copy = types_pb2.BlockCopy(
        handle=HANDLE,
        group_index=1,
        source_block_id=14,
        target_block_id=22,
        token_count=3,
        block_index=3,
    )
    outcome.decode.copies.append(copy)
    return outcome


def _open_message() -> cache_pb2.EntryOutcome:
    outcome = cache_pb2.EntryOutcome()
    plan = outcome.open.plan
    plan.handle = HANDLE
    plan.cached.end_token = plan.scheduled.start_token = 12
    plan.scheduled.end_token = 15
    for part in OPENED.groups:
        group = plan.groups.add(start_block=part.start_block, block_ids=part.block_ids)
        group.slots.first_slots.append(part.slots[0])
        group.slots.slot_counts.append(len(part.slots))
    plan.freed_blocks.add(handle=HANDLE, group_index=1, block_index=1, block_id=12)
    return outcome


def _opened_of(draft: StepDraft) -> StepAnswer:
    return step_answer(cache_pb2.StepResponse(step_id=1, outcomes=[_open_message()]), draft)


def test_s23_messages_of_several_groups(scheduler: Scheduler, sequence: Sequence) -> None:
    """S23: groups, columns, freed blocks and copies come over the wire as they are."""
    draft = scheduler.draft()
    (outcome,) = _opened_of(draft).opens
    assert isinstance(outcome, Opened)
    assert outcome.plan == replace(OPENED, freed=(freed(1, 1, 12),))

    scheduler.apply(draft, opened(OPENED))
    sequence.token_ids.append(70)
    response = cache_pb2.StepResponse(step_id=2, outcomes=[_decode_message()])
    response.remaps.add(
        handle=HANDLE, group_index=1, block_index=2, old_block_id=13, new_block_id=3
    )
    answer = step_answer(response, scheduler.draft())
    assert answer.decoded == Decoded(
        ((5,), (15,)),
        copies=(Copy(14, 22, 3, handle=HANDLE, block_index=3, group_index=1),),
        freed=(freed(1, 1, 12),),
    )
    assert answer.remaps == (Remap(HANDLE, 2, 13, 3, 1),)
