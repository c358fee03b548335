"""Who runs, who waits and who gives up its blocks, against hand-written answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixd.worker.limits import AWAIT_COUNT_MAX, SHORTAGE_COUNT_MAX, LimitInvalid, SchedulerLimits
from prefixd.worker.plan_check import PlanInvalid, PoolShape
from prefixd.worker.scheduler import Scheduler
from prefixd.worker.sequence import Sequence, SequencePhase
from prefixd.worker.step import (
    Applied,
    Awaiting,
    Close,
    CloseReason,
    Copy,
    Cut,
    Decoded,
    Extended,
    GroupPlan,
    Opened,
    Plan,
    Refused,
    StepAnswer,
    StepDraft,
)

SHAPE = PoolShape(block_count=100, block_size=4)
EXHAUSTED = Refused("POOL_EXHAUSTED")


class Bench:
    """A scheduler, and answers that grant whatever is not refused."""

    def __init__(self, **limits: int) -> None:
        bounds = {"chunk_token_count_max": 8, "running_sequence_count_max": 4, "token_budget": 32}
        self.scheduler = Scheduler(SHAPE, SchedulerLimits(**(bounds | limits)))
        self.step_id = 0
        self.next_block_id = 1
        self.arrival = 0

    def add(self, token_count: int) -> Sequence:
        """A new prompt of so many tokens."""
        self.arrival += 1
        sequence = Sequence(
            sequence_id=f"s{self.arrival}",
            token_ids=list(range(token_count)),
            prompt_token_count=token_count,
            arrival=self.arrival,
        )
        self.scheduler.add(sequence)
        return sequence

    def grant(
        self,
        draft: StepDraft,
        *,
        deferred: dict[int, str] | None = None,
        opens: dict[str, Refused | Awaiting] | None = None,
        available_block_count: int = 50,
    ) -> StepAnswer:
        """The answer that grants everything but the rows and sequences named."""
        self.step_id += 1
        new_block_ids = tuple(
            self._blocks(1)[0] if row.position % SHAPE.block_size == 0 else 0
            for row in draft.decode_rows
        )
        extends = tuple(
            Extended(self._plan(e.sequence, e.handle, e.schedule_token_count_max))
            for e in draft.extends
        )
        outcomes = tuple(
            (opens or {}).get(
                e.sequence.sequence_id,
                Opened(self._plan(e.sequence, e.handle, e.schedule_token_count_max), 0),
            )
            for e in draft.opens
        )
        return StepAnswer(
            self.step_id,
            Decoded((new_block_ids,), deferred or {}),
            extends,
            outcomes,
            available_block_count=available_block_count,
        )

    def step(self, draft: StepDraft | None = None, **refusals: object) -> Applied:
        """Drafts, grants, applies; every sequence that wants a token gets a 7."""
        draft = draft or self.scheduler.draft()
        applied = self.scheduler.apply(draft, self.grant(draft, **refusals))  # type: ignore[arg-type]
        for chunk in applied.pass_plan.chunks:
            if chunk.wants_logits:
                chunk.sequence.token_ids.append(7)
        return applied

    def _blocks(self, count: int) -> list[int]:
        first = self.next_block_id
        self.next_block_id += count
        return [1 + (block_id - 1) % 99 for block_id in range(first, first + count)]

    def _plan(self, sequence: Sequence, handle: int, token_count_max: int) -> Plan:
        start = sequence.scheduled_count
        end = min(start + token_count_max, sequence.token_count)
        held = [block_id for table in sequence.tables for block_id in table]
        blocks = self._blocks(-(-end // SHAPE.block_size) - len(held))
        table = held + blocks
        slots = tuple(table[p // 4] * 4 + p % 4 for p in range(start, end))
        return Plan(handle, start, start, end, (GroupPlan(len(held), tuple(blocks), slots),))


def ids(draft: StepDraft) -> list[str]:
    """Names of the sequences that a draft opens."""
    return [opening.sequence.sequence_id for opening in draft.opens]


def test_long_prompt_is_prefilled_in_chunks_and_sampled_at_its_end() -> None:
    """20 tokens by chunks of 8: 8, 8, 4, and only the last one wants logits."""
    bench = Bench()
    bench.add(20)

    chunks = [bench.step().pass_plan.chunks for _ in range(3)]

    assert [[len(c.token_ids) for c in step] for step in chunks] == [[8], [8], [4]]
    assert [c.wants_logits for step in chunks for c in step] == [False, False, True]


def test_newest_token_is_decoded_as_a_row() -> None:
    """After prefill each step schedules the newest token's position, and tells the token."""
    bench = Bench()
    sequence = bench.add(5)
    bench.step()

    draft = bench.scheduler.draft()

    (row,) = draft.decode_rows
    assert (row.position, row.token_id, row.handle) == (5, 7, sequence.handle)
    (chunk,) = bench.step(draft).pass_plan.chunks
    assert chunk.slots == ((sequence.tables[0][1] * 4 + 1,),)


def test_rows_come_before_prefill_and_the_budget_bounds_both() -> None:
    """With a budget of 10, one row and one chunk of 8 leave one token for the next chunk."""
    bench = Bench(token_budget=10)
    bench.add(3)
    bench.step()
    bench.add(40)
    bench.add(40)
    bench.step()

    draft = bench.scheduler.draft()

    assert len(draft.decode_rows) == 1
    assert [e.schedule_token_count_max for e in draft.extends] == [8, 1]
    assert draft.token_budget == 10


def test_admission_is_in_order_of_arrival_and_bounded() -> None:
    """No more sequences run than the limit says; the earliest come first."""
    bench = Bench(running_sequence_count_max=2)
    for _ in range(3):
        bench.add(4)

    assert ids(bench.scheduler.draft()) == ["s1", "s2"]


def test_nobody_passes_a_sequence_that_found_too_few_blocks() -> None:
    """Behind a refused sequence nobody is tried until more blocks are there; then it is first."""
    bench = Bench()
    bench.add(4)
    bench.step()
    bench.add(40)
    bench.step(opens={"s2": EXHAUSTED}, available_block_count=5)
    bench.add(4)

    assert ids(bench.scheduler.draft()) == []
    bench.step(StepDraft(), available_block_count=9)
    assert ids(bench.scheduler.draft()) == ["s2"]


def test_latest_arrival_gives_up_its_blocks() -> None:
    """A row without a block: the next step closes the latest arrival and admits nobody."""
    bench = Bench()
    first, last = bench.add(4), bench.add(4)
    bench.step()
    waiting = bench.add(4)
    bench.step(deferred={0: "POOL_EXHAUSTED"}, opens={"s3": EXHAUSTED})
    handle = last.handle

    draft = bench.scheduler.draft()

    assert draft.closes == (Close(handle, CloseReason.PREEMPTED),)
    assert [row.sequence for row in draft.decode_rows] == [first]
    assert draft.opens == ()
    assert (last.preemption_count, last.phase) == (1, SequencePhase.WAITING)
    bench.step(draft, available_block_count=51)
    reopened = bench.scheduler.draft().opens[0]
    assert reopened.sequence is last, "it waits before those who came later"
    assert reopened.token_ids == tuple(last.token_ids)
    assert reopened.handle != handle
    assert waiting.preemption_count == 0


def test_sequence_that_runs_alone_is_never_preempted_but_given_up_in_the_end() -> None:
    """Alone without a block it tries again, a bounded number of times."""
    bench = Bench()
    sequence = bench.add(4)
    bench.step()

    for _ in range(SHORTAGE_COUNT_MAX - 1):
        assert bench.step(deferred={0: "POOL_EXHAUSTED"}).rejections == ()
    (rejection,) = bench.step(deferred={0: "POOL_EXHAUSTED"}).rejections

    assert (rejection.sequence, rejection.reason) == (sequence, "POOL_EXHAUSTED")
    assert sequence.preemption_count == 0


def test_admission_looks_ahead_to_the_whole_prompt() -> None:
    """An open must fit with all its tokens and a block of growth for each that runs."""
    bench = Bench()
    bench.add(4)
    bench.step()
    bench.add(30)
    bench.add(2_000)

    opens = bench.scheduler.draft().opens

    assert [o.must_fit_token_count for o in opens] == [30 + 4, 99 * 4]


def test_ended_while_its_open_is_out_is_closed_once_it_is_answered() -> None:
    """Its plan is executed all the same (others may read its blocks), without sampling."""
    bench = Bench()
    sequence = bench.add(4)
    draft = bench.scheduler.draft()
    bench.scheduler.end(sequence, CloseReason.ABORTED)

    (chunk,) = bench.step(draft).pass_plan.chunks

    assert not chunk.wants_logits
    assert bench.scheduler.draft().closes == (Close(1, CloseReason.ABORTED),)
    assert not bench.scheduler.has_work


def test_ended_between_draft_and_answer_is_closed_once() -> None:
    """A running sequence that ends while a step is out: its row is executed, one close follows."""
    bench = Bench()
    sequence = bench.add(4)
    bench.step()
    draft = bench.scheduler.draft()
    bench.scheduler.end(sequence, CloseReason.ABORTED)

    (chunk,) = bench.step(draft).pass_plan.chunks

    assert not chunk.wants_logits
    assert bench.scheduler.draft().closes == (Close(1, CloseReason.ABORTED),)
    assert not bench.scheduler.has_work


def test_cut_sequence_extends_from_where_it_was_cut() -> None:
    """After a failed step the next entry is an extend, with the tokens not yet known."""
    bench = Bench()
    sequence = bench.add(6)
    bench.step()
    bench.scheduler.apply_cuts((Cut(sequence.handle, known_count=6, scheduled_count=4),))

    draft = bench.scheduler.draft()

    (extend,) = draft.extends
    assert (extend.known_count_before, extend.scheduled_count_before) == (6, 4)
    assert extend.token_ids == (7,)
    (chunk,) = bench.step(draft).pass_plan.chunks
    assert (chunk.start_position, len(chunk.token_ids), chunk.wants_logits) == (4, 3, True)
    assert len(bench.scheduler.draft().decode_rows) == 1


def test_new_epoch_opens_everybody_again_in_order() -> None:
    """Nothing of the old epoch is used: handles begin anew, all tokens travel again."""
    bench = Bench(running_sequence_count_max=2)
    for _ in range(3):
        bench.add(4)
    bench.step()
    bench.scheduler.draft()

    bench.scheduler.begin_epoch()
    draft = bench.scheduler.draft()

    assert ids(draft) == ["s1", "s2"]
    assert [o.handle for o in draft.opens] == [1, 2]
    assert [len(o.token_ids) for o in draft.opens] == [5, 5]
    assert (draft.closes, draft.decode_rows, draft.extends) == ((), (), ())


def test_awaiting_is_bounded_and_holds_nobody_up() -> None:
    """Those behind an awaiting sequence are admitted; in the end it opens without awaiting."""
    bench = Bench()
    awaiting = bench.add(8)
    bench.add(4)

    bench.step(opens={"s1": Awaiting(4)})
    assert bench.scheduler.running_count == 1
    for _ in range(AWAIT_COUNT_MAX - 1):
        bench.step(opens={"s1": Awaiting(4)})
    (opening,) = bench.scheduler.draft().opens

    assert (opening.sequence, opening.await_token_count_min) == (awaiting, 0)


def test_refused_for_good_is_rejected() -> None:
    """A sequence that can never fit ends with the controller's reason."""
    bench = Bench()
    sequence = bench.add(4)

    applied = bench.step(opens={"s1": Refused("SEQUENCE_EXCEEDS_POOL", "too long")})

    assert [(r.sequence, r.reason) for r in applied.rejections] == [
        (sequence, "SEQUENCE_EXCEEDS_POOL")
    ]
    assert not bench.scheduler.has_work


@pytest.mark.parametrize(
    "change",
    [
        {"slots": (8, 9, 10, 12)},
        {"slots": (4, 5, 6)},
        {"block_ids": (0,)},
        {"block_ids": (100,)},
        {"block_ids": ()},
        {"handle": 2},
        {"start_block": 1},
        {"scheduled_end": 5},
        {"cached_end": 2},
        {"copies": (Copy(1, 100, 2),)},
        {"copies": (Copy(1, 2, 5),)},
    ],
    ids=str,
)
def test_plan_that_contradicts_the_pool_is_not_executed(change: dict[str, object]) -> None:
    """A slot outside the table, a block outside the pool, a position that does not follow."""
    bench = Bench()
    bench.add(4)
    draft = bench.scheduler.draft()
    answer = bench.grant(draft)
    (opened,) = answer.opens
    assert isinstance(opened, Opened)
    (part,) = opened.plan.groups
    of_group = {name: change[name] for name in change if hasattr(part, name)}
    of_plan = {name: change[name] for name in change if name not in of_group}
    part = replace(part, **of_group)  # type: ignore[arg-type]
    plan = replace(opened.plan, groups=(part,), **of_plan)  # type: ignore[arg-type]
    spoiled = Opened(plan, 0)

    with pytest.raises(PlanInvalid):
        bench.scheduler.apply(draft, replace(answer, opens=(spoiled,)))


@pytest.mark.parametrize("block_id", [0, 100])
def test_row_without_the_block_it_needs_is_not_executed(block_id: int) -> None:
    """A row at a block's first position needs a block of the pool."""
    bench = Bench()
    bench.add(4)
    bench.step()
    draft = bench.scheduler.draft()
    answer = replace(bench.grant(draft), decoded=Decoded(((block_id,),)))

    with pytest.raises(PlanInvalid):
        bench.scheduler.apply(draft, answer)


def test_limits_leave_room_for_prefill() -> None:
    """A budget that a full batch of rows would use up is refused."""
    with pytest.raises(LimitInvalid, match="--token-budget"):
        SchedulerLimits(running_sequence_count_max=8, token_budget=8)
