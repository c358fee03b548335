"""Branches, copies and remaps in the scheduler, against hand-written answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.plan_check import PlanInvalid, PoolShape
from prefixd.worker.scheduler import Scheduler
from prefixd.worker.sequence import Sequence, SequencePhase
from prefixd.worker.step import (
    CloseReason,
    Copy,
    Decoded,
    Forked,
    GroupPlan,
    Opened,
    Plan,
    Refused,
    Remap,
    StepAnswer,
)

SHAPE = PoolShape(block_count=50, block_size=4)
PARENT_BLOCKS = (1, 2)


def sequence(name: str, token_count: int, *, arrival: int = 1) -> Sequence:
    """So many tokens, of which six are a prompt."""
    return Sequence(name, list(range(token_count)), prompt_token_count=6, arrival=arrival)


@pytest.fixture
def scheduler() -> Scheduler:
    """Room for four sequences."""
    return Scheduler(
        SHAPE,
        SchedulerLimits(chunk_token_count_max=8, running_sequence_count_max=4, token_budget=32),
    )


@pytest.fixture
def parent(scheduler: Scheduler) -> Sequence:
    """A running sequence whose prompt of six tokens is computed, with its first own token."""
    one = sequence("parent", 6)
    scheduler.add(one)
    draft = scheduler.draft()
    plan = Plan(1, 0, 0, 6, (GroupPlan(0, PARENT_BLOCKS, tuple(range(4, 10))),))
    scheduler.apply(draft, StepAnswer(1, opens=(Opened(plan, 0),), available_block_count=40))
    one.token_ids.append(70)
    return one


@pytest.fixture
def child(scheduler: Scheduler, parent: Sequence) -> Sequence:
    """A branch behind the prompt, not yet sent."""
    one = sequence("child", 6)
    one.token_ids.append(71)
    scheduler.branch(one, parent=parent, token_count=6)
    return one


def test_s16_child_is_forked_and_decoded_in_one_step(
    scheduler: Scheduler, parent: Sequence, child: Sequence
) -> None:
    """S16: the fork comes first, then both rows; the copy changes the parent's table alone."""
    draft = scheduler.draft()
    (fork,) = draft.forks
    assert (fork.parent_handle, fork.token_count) == (parent.handle, 6)
    assert [(row.handle, row.token_id) for row in draft.decode_rows] == [
        (parent.handle, 70),
        (fork.handle, 71),
    ]

    answer = StepAnswer(
        2,
        Decoded(((0, 0),), copies=(Copy(2, 9, 2, handle=parent.handle, block_index=1),)),
        forks=(Forked((PARENT_BLOCKS,)),),
    )
    applied = scheduler.apply(draft, answer)

    assert (parent.tables, child.tables) == (([1, 9],), ([1, 2],))
    assert [chunk.slots for chunk in applied.pass_plan.chunks] == [((9 * 4 + 2,),), ((2 * 4 + 2,),)]
    assert applied.pass_plan.copies == answer.decoded.copies
    assert child.phase is SequencePhase.RUNNING


def test_s16_refused_fork_is_opened_as_any_other(
    scheduler: Scheduler, parent: Sequence, child: Sequence
) -> None:
    """S16: nothing is lost where a child cannot share: it waits, and is opened with all tokens."""
    draft = scheduler.draft()
    answer = StepAnswer(
        2,
        Decoded(((0, 0),), {1: "SEQUENCE_NOT_FOUND"}),
        forks=(Refused("LIMIT_EXCEEDED"),),
        available_block_count=40,
    )
    applied = scheduler.apply(draft, answer)
    parent.token_ids.append(72)

    assert applied.rejections == ()
    (opening,) = scheduler.draft().opens
    assert opening.sequence is child
    assert opening.token_ids == (0, 1, 2, 3, 4, 5, 71)


def test_parent_that_ends_is_closed_behind_the_fork(
    scheduler: Scheduler, parent: Sequence, child: Sequence
) -> None:
    """The child still shares its blocks: forks stand before closes."""
    scheduler.end(parent, CloseReason.FINISHED)
    draft = scheduler.draft()

    assert [fork.sequence for fork in draft.forks] == [child]
    assert [close.handle for close in draft.closes] == [parent.handle]
    assert [row.sequence for row in draft.decode_rows] == [child]


def test_child_that_ends_before_its_fork_is_never_sent(
    scheduler: Scheduler, child: Sequence
) -> None:
    """Nobody wants it any more."""
    scheduler.end(child, CloseReason.ABORTED)
    assert scheduler.draft().forks == ()


def test_child_that_ends_during_its_fork_is_closed(
    scheduler: Scheduler, parent: Sequence, child: Sequence
) -> None:
    """Its row runs all the same, for others may read its blocks, but nobody reads its logits."""
    draft = scheduler.draft()
    scheduler.end(child, CloseReason.ABORTED)
    copy = Copy(2, 9, 2, handle=parent.handle, block_index=1)
    answer = StepAnswer(2, Decoded(((0, 0),), copies=(copy,)), forks=(Forked((PARENT_BLOCKS,)),))
    applied = scheduler.apply(draft, answer)

    assert [chunk.wants_logits for chunk in applied.pass_plan.chunks] == [True, False]
    assert [close.handle for close in scheduler.draft().closes] == [draft.forks[0].handle]


def test_branch_of_a_sequence_that_is_not_open_waits(
    scheduler: Scheduler, parent: Sequence
) -> None:
    """After a new epoch nothing can be shared by name; the cache shares it."""
    scheduler.begin_epoch()
    child = sequence("late", 7)
    scheduler.branch(child, parent=parent, token_count=6)

    draft = scheduler.draft()
    assert draft.forks == ()
    assert [opening.sequence for opening in draft.opens] == [parent, child]


def test_s15_remap_repoints_the_table(scheduler: Scheduler, parent: Sequence) -> None:
    """S15: from this step on the other block is read; one of a sequence that is gone is ignored."""
    remaps = (
        Remap(parent.handle, block_index=0, old_block_id=1, new_block_id=30),
        Remap(999, block_index=0, old_block_id=1, new_block_id=30),
    )
    applied = scheduler.apply(scheduler.draft(), StepAnswer(2, Decoded(((0,),)), remaps=remaps))

    assert parent.tables == ([30, 2],)
    assert applied.pass_plan.chunks[0].tables == ((30, 2),)


BAD_ANSWERS: dict[str, Callable[[StepAnswer, Sequence], StepAnswer]] = {
    "copy of another block": lambda answer, parent: replace(
        answer,
        decoded=Decoded(((0, 0),), copies=(Copy(3, 9, 2, handle=parent.handle, block_index=1),)),
    ),
    "copy of a block that is not written": lambda answer, parent: replace(
        answer,
        decoded=Decoded(((0, 0),), copies=(Copy(1, 9, 2, handle=parent.handle, block_index=0),)),
    ),
    "copy for nobody": lambda answer, _: replace(
        answer, decoded=Decoded(((0, 0),), copies=(Copy(2, 9, 2, handle=77, block_index=1),))
    ),
    "too few blocks": lambda answer, _: replace(answer, forks=(Forked(((1,),)),)),
    "a block outside the pool": lambda answer, _: replace(answer, forks=(Forked(((1, 50),)),)),
    "remap of another block": lambda answer, parent: replace(
        answer, remaps=(Remap(parent.handle, 1, 5, 6),)
    ),
    "remap behind the table": lambda answer, parent: replace(
        answer, remaps=(Remap(parent.handle, 2, 5, 6),)
    ),
}


@pytest.mark.parametrize("name", sorted(BAD_ANSWERS))
def test_contradicting_answers_are_not_executed(
    scheduler: Scheduler, parent: Sequence, child: Sequence, name: str
) -> None:
    """A wrong block would be somebody else's KV."""
    draft = scheduler.draft()
    good = StepAnswer(2, Decoded(((0, 0),)), forks=(Forked((PARENT_BLOCKS,)),))
    with pytest.raises(PlanInvalid):
        scheduler.apply(draft, BAD_ANSWERS[name](good, parent))
    assert child in {fork.sequence for fork in draft.forks}


def test_beams_that_all_wait_give_room_to_one_that_finds_none(
    scheduler: Scheduler, parent: Sequence
) -> None:
    """Nothing runs while a waiting sequence is blocked: the latest gives its blocks up."""
    parent.token_ids.pop()
    blocked = sequence("blocked", 6, arrival=2)
    scheduler.add(blocked)
    refused = StepAnswer(2, opens=(Refused("POOL_EXHAUSTED"),), available_block_count=0)
    scheduler.apply(scheduler.draft(), refused)

    draft = scheduler.draft()

    assert [close.reason for close in draft.closes] == [CloseReason.PREEMPTED]
    assert blocked in {opening.sequence for opening in draft.opens}
