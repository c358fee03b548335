"""What failed steps take back (section 4.1 of the design)."""

import pytest

from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.messages import (
    CutSequence,
    DecodeOutcome,
    DeferredRow,
    ExtendOutcome,
    Handle,
    Identity,
    OpenOutcome,
    TokenRange,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    new_block_ids,
    open_entry,
)

PROMPT = list(range(100, 113))


def test_every_table_is_cut_to_its_published_run() -> None:
    """Also that of a sequence whose lost positions an earlier step had written."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.step(open_entry(2, [1] * 6), executed=1)
    reply = driver.step(executed=1, failed=(2, 2))
    assert reply.cut_sequences == (
        CutSequence(Handle(1), 13, 12),
        CutSequence(Handle(2), 6, 0),
    )
    assert driver.table(1) == [1, 2, 3]
    assert driver.table(2) == []
    assert driver.free_order()[:3] == [6, 5, 4]
    assert driver.pending() == []


def test_a_sequence_that_lost_nothing_is_not_cut() -> None:
    """Its published blocks end where its positions do; only reserved blocks are given back."""
    driver = Driver()
    driver.open(1, PROMPT[:4], lookahead_slot_count=4)
    driver.step(open_entry(2, [5]), executed=1)
    reply = driver.step(executed=1, failed=(2, 2))
    assert [cut.handle for cut in reply.cut_sequences] == [2]
    assert driver.table(1) == [1]
    assert driver.free_order()[:2] == [3, 2]
    assert driver.decode(1, 9) == 3


def test_idle_unwritten_blocks_move_to_the_front() -> None:
    """S17: in the order they had; matches do not find them any more."""
    driver = Driver()
    driver.step(open_entry(1, PROMPT))
    driver.step(close_entry(1), executed=0)
    assert driver.free_order() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    driver.step(executed=0, failed=(1, 2))
    assert driver.free_order() == [3, 2, 1, 4, 5, 6, 7, 8, 9, 10]
    assert driver.match(PROMPT).published_token_count == 0


def test_control_effects_of_failed_steps_stand() -> None:
    """Opens, closes and known tokens are facts; only the positions are lost."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.open(2, [1, 2])
    driver.step(close_entry(2), decode_entry((1, 13, 13, [7])), open_entry(3, [4, 5]), executed=2)
    driver.step(executed=2, failed=(3, 3))
    assert driver.sequence(1).known_count == 14
    assert sorted(driver.pool.state.sequences) == [1, 3]


def test_a_cut_sequence_needs_an_extend() -> None:
    """A decode row at the right position is deferred until then; the extend schedules the rest."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(decode_entry((1, 13, 13, [7])), executed=1)
    driver.step(executed=1, failed=(2, 2))
    assert driver.sequence(1).cut
    outcome = driver.outcome(decode_entry((1, 12, 14, [8])))
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.deferred_rows == (DeferredRow(0, "POSITION_MISMATCH"),)
    extended = driver.extend(1, [])
    assert extended.plan.scheduled == TokenRange(12, 14)
    driver.decode(1, 8)


def test_the_extend_of_a_cut_sequence_matches_again_and_counts_nothing() -> None:
    """What another sequence has published in the meantime is not computed twice."""
    driver = Driver(block_count=20)
    driver.step(open_entry(1, PROMPT))
    driver.step(open_entry(2, PROMPT), executed=0, failed=(1, 1))
    driver.step(executed=2)
    statistics = driver.pool.state.statistics
    counted = (statistics.sequence_count, statistics.query_token_count)
    extended = driver.extend(1, [])
    assert extended.plan.cached == TokenRange(0, 12)
    assert extended.plan.scheduled == TokenRange(12, 13)
    assert new_block_ids(extended)[:3] == driver.table(2)[:3]
    assert (statistics.sequence_count, statistics.query_token_count) == counted


def test_a_cut_uncacheable_sequence_begins_again() -> None:
    """It has no published block, so nothing is kept."""
    driver = Driver(block_count=20)
    unknown = Identity(has_unknown_fields=True)
    driver.open(1, PROMPT, identity=unknown)
    driver.step(decode_entry((1, 13, 13, [7])), executed=1)
    reply = driver.step(executed=1, failed=(2, 2))
    assert reply.cut_sequences == (CutSequence(Handle(1), 14, 0),)
    assert driver.extend(1, []).plan.scheduled == TokenRange(0, 14)


def test_an_own_written_copy_counts_as_published() -> None:
    """The table keeps it; its place in the index is another sequence's block."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT[:8])
    driver.open(2, PROMPT[:8])
    driver.step(decode_entry((2, 8, 8, [5])), executed=2)
    assert driver.table(2)[:2] == [1, 3]
    reply = driver.step(executed=2, failed=(3, 3))
    assert reply.cut_sequences == (CutSequence(Handle(2), 9, 8),)
    assert driver.table(2) == [1, 3]


def test_several_steps_fail_at_once() -> None:
    """All that is unconfirmed, up to the last applied step; the ids stay used."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    for position in range(13, 16):
        driver.step(decode_entry((1, position, position, [position])), executed=1)
    reply = driver.step(executed=1, failed=(2, 4))
    assert reply.cut_sequences == (CutSequence(Handle(1), 16, 12),)
    assert reply.step_id == 5
    driver.step(executed=5)


def test_executed_and_failed_steps_in_one_report() -> None:
    """What was executed is published before the rest is taken back."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT[:4])
    driver.step(extend_entry(1, PROMPT[4:8], known=4, scheduled=4), executed=1)
    driver.step(extend_entry(1, PROMPT[8:12], known=8, scheduled=8), executed=1)
    reply = driver.step(executed=2, failed=(3, 3))
    assert reply.cut_sequences == (CutSequence(Handle(1), 12, 8),)
    assert sorted(driver.published()) == [1, 2]


def test_a_step_may_fail_again() -> None:
    """The first failed id follows the last settled one."""
    driver = Driver(block_count=20)
    driver.step(open_entry(1, PROMPT))
    driver.step(extend_entry(1, [], known=13, scheduled=0), executed=0, failed=(1, 1))
    driver.step(extend_entry(1, [], known=13, scheduled=0), executed=0, failed=(2, 2))
    driver.step(executed=3)
    assert driver.sequence(1).written_count == 13


@pytest.mark.parametrize(
    ("executed", "failed", "field"),
    [
        (1, (3, 3), "failed_step_id"),
        (1, (1, 3), "failed_step_id"),
        (1, (2, 2), "failed_step_id_last"),
        (1, (2, 4), "failed_step_id_last"),
        (3, (4, 3), "failed_step_id_last"),
    ],
)
def test_a_report_that_names_other_steps_is_refused(
    executed: int, failed: tuple[int, int], field: str
) -> None:
    """The failed steps are all that follow the executed ones."""
    driver = Driver(block_count=20)
    driver.open(1, PROMPT)
    driver.step(decode_entry((1, 13, 13, [1])), executed=1)
    driver.step(decode_entry((1, 14, 14, [1])), executed=1)
    before = driver.seen()
    with pytest.raises(FieldInvalid) as caught:
        driver.step(executed=executed, failed=failed)
    assert caught.value.field == field
    assert driver.seen() == before


def test_the_same_digests_are_published_with_and_without_a_failure() -> None:
    """In a pool that never evicts."""
    digests: list[set[bytes]] = []
    for fails in (False, True):
        driver = Driver(block_count=60)
        driver.open(1, PROMPT)
        driver.open(2, PROMPT[:8])
        driver.step(open_entry(3, PROMPT[:8]), decode_entry((1, 13, 13, [7])), executed=2)
        if fails:
            reply = driver.step(executed=2, failed=(3, 3))
            for cut in reply.cut_sequences:
                driver.extend(cut.handle, [])
        for token_id in (8, 9, 10):
            driver.decode(1, token_id)
        driver.step()
        digests.append(set(driver.published().values()))
    assert digests[0] == digests[1]


def test_a_prefix_matched_while_pending_is_lost_with_its_step() -> None:
    """Both its writer and its reader are cut; what is recomputed once is shared again."""
    driver = Driver(block_count=20)
    driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT))
    reply = driver.step(executed=0, failed=(1, 1))
    assert [cut.scheduled_count for cut in reply.cut_sequences] == [0, 0]
    first, second = driver.step(
        extend_entry(1, [], known=13, scheduled=0), extend_entry(2, [], known=13, scheduled=0)
    ).outcomes
    assert isinstance(first, ExtendOutcome)
    assert isinstance(second, ExtendOutcome)
    assert second.plan.cached == TokenRange(0, 12)
    assert driver.table(1)[:3] == driver.table(2)[:3]


def test_a_reused_row_knows_nothing_of_its_predecessor() -> None:
    """A step confirmed late says nothing about the sequence that was opened since."""
    driver = Driver(block_count=20)
    driver.step(open_entry(1, PROMPT))
    driver.step(close_entry(1), executed=0)
    opened = driver.outcome(open_entry(2, [7, 8, 9]), executed=0)
    assert isinstance(opened, OpenOutcome)
    driver.step(executed=2)
    assert driver.sequence(2).written_count == 0
    driver.step(executed=3)
    assert driver.sequence(2).written_count == 3
