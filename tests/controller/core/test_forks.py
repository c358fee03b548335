"""Forks and copies on write (S16, and S22 with copies)."""

import random

from prefixd.controller.core import inspect
from prefixd.controller.core.inspect import BlockContent
from prefixd.controller.core.messages import (
    BlockCopy,
    CloseOutcome,
    DecodeOutcome,
    DeferredRow,
    ExtendOutcome,
    ForkOutcome,
    Identity,
    OpenOutcome,
    Refusal,
)
from tests.controller.core.driver import (
    Driver,
    close_entry,
    decode_entry,
    extend_entry,
    fork_entry,
    new_block_ids,
    open_entry,
    slots,
)

PROMPT = [1, 2, 3, 4, 5, 6]


def copies(outcome: object) -> list[tuple[int, ...]]:
    """Returns what an outcome copies: handle, source, target, tokens, index in the table."""
    if isinstance(outcome, DecodeOutcome):
        found: tuple[BlockCopy, ...] = outcome.copies
    else:
        assert isinstance(outcome, OpenOutcome | ExtendOutcome | ForkOutcome), outcome
        found = outcome.plan.copies
    return [
        (
            copy.handle,
            copy.source_block_id,
            copy.target_block_id,
            copy.token_count,
            copy.block_index,
        )
        for copy in found
    ]


def held_count(driver: Driver) -> int:
    """Counts the held blocks."""
    return inspect.pool_view(driver.pool).held_block_count


def test_s16_a_child_shares_all_blocks_and_takes_none() -> None:
    """Its plan shows the shared table and schedules nothing; no statistics count it."""
    driver = Driver()
    driver.open(1, PROMPT)
    before = inspect.pool_view(driver.pool).statistics
    outcome = driver.fork(1, 2, 6)
    assert driver.table(2) == driver.table(1) == [1, 2]
    assert held_count(driver) == 2
    assert new_block_ids(outcome) == [1, 2]
    assert slots(outcome) == []
    plan = outcome.plan
    assert (plan.cached.start_token, plan.cached.end_token) == (0, 6)
    assert (plan.scheduled.start_token, plan.scheduled.end_token) == (6, 6)
    view = driver.sequence(2)
    assert (view.known_count, view.scheduled_count, view.written_count) == (6, 6, 6)
    assert inspect.pool_view(driver.pool).statistics == before
    assert [block.holder_count for block in driver.blocks()[:3]] == [2, 2, 0]


def test_s16_the_first_writer_gets_a_copy_and_the_last_holder_writes_in_place() -> None:
    """Three samples of one prompt make two copies of its partial block."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(fork_entry(1, 2, 6), fork_entry(1, 3, 6))
    rows = [driver.row(handle, 70 + handle) for handle in (2, 1, 3)]
    (outcome,) = driver.step(decode_entry(*rows)).outcomes
    assert copies(outcome) == [(2, 2, 3, 2, 1), (1, 2, 4, 2, 1)]
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.new_block_ids[0].tolist() == [0, 0, 0]
    assert [driver.table(handle) for handle in (1, 2, 3)] == [[1, 4], [1, 3], [1, 2]]
    rows = [driver.row(handle, 80 + handle) for handle in (1, 2, 3)]
    (outcome,) = driver.step(decode_entry(*rows)).outcomes
    assert copies(outcome) == []


def test_s16_an_extend_carries_its_copy_and_writes_into_the_target() -> None:
    """The slots of a plan lie in the private block from the first position on."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.fork(1, 2, 6)
    outcome = driver.extend(2, [7, 8, 9])
    assert copies(outcome) == [(2, 2, 3, 2, 1)]
    assert new_block_ids(outcome) == [4]
    assert slots(outcome) == [14, 15, 16]
    assert driver.table(2) == [1, 3, 4]


def test_s16_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    """Full blocks are never written again."""
    driver = Driver()
    driver.open(1, PROMPT[:4])
    driver.fork(1, 2, 4)
    rows = [driver.row(1, 8), driver.row(2, 9)]
    (outcome,) = driver.step(decode_entry(*rows)).outcomes
    assert copies(outcome) == []
    assert [driver.table(1), driver.table(2)] == [[1, 2], [1, 3]]


def test_s16_a_fork_inside_a_full_block_keeps_it_from_eviction_until_it_is_copied() -> None:
    """The child holds the indexed block; it copies it even when nobody else holds it."""
    driver = Driver(block_count=5)
    driver.open(1, [*PROMPT, 7, 8])
    driver.fork(1, 2, 6)
    driver.close(1)
    assert driver.table(2) == [1, 2]
    assert driver.free_order() == [3, 4]
    (copy,) = copies(driver.extend(2, [9]))
    assert copy == (2, 2, 3, 2, 1)
    assert driver.free_order() == [4, 2], "the source is cached and idle now"
    assert driver.match([*PROMPT, 7, 8, 9]).published_token_count == 8


def test_s16_a_shared_block_that_its_parent_completes_is_published() -> None:
    """A position scheduled before the fork is made known behind it: nobody writes."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(decode_entry((1, 6, 6, [7])))
    driver.step(decode_entry((1, 7, 7, [])))
    driver.fork(1, 2, 7)
    (outcome,) = driver.step(decode_entry((1, 8, 7, [8]))).outcomes
    assert copies(outcome) == []
    driver.step()
    assert driver.blocks()[1].content is BlockContent.PUBLISHED
    assert driver.blocks()[1].holder_count == 2
    assert copies(driver.extend(2, [9])) == [(2, 2, 4, 3, 1)]


def test_s16_a_copy_of_what_this_step_computes_is_deferred() -> None:
    """A child forked in its parent's step may write in the next one only."""
    driver = Driver()
    outcomes = driver.step(
        open_entry(1, PROMPT),
        fork_entry(1, 2, 6),
        decode_entry((2, 6, 6, [7])),
        extend_entry(2, [7], known=6, scheduled=6),
    ).outcomes
    assert isinstance(outcomes[1], ForkOutcome)
    assert isinstance(outcomes[2], DecodeOutcome)
    assert outcomes[2].deferred_rows == (DeferredRow(0, "COPY_IN_SAME_STEP"),)
    assert isinstance(outcomes[3], Refusal)
    assert outcomes[3].reason == "COPY_IN_SAME_STEP"
    assert driver.sequence(2).known_count == 6
    assert copies(driver.extend(2, [7])) == [(2, 2, 3, 2, 1)]


def test_s16_a_parent_waits_too_where_its_child_shares_what_this_step_computes() -> None:
    """Whoever would need the copy is deferred."""
    driver = Driver()
    outcomes = driver.step(
        open_entry(1, PROMPT), fork_entry(1, 2, 6), decode_entry((1, 6, 6, [7]))
    ).outcomes
    assert isinstance(outcomes[2], DecodeOutcome)
    assert outcomes[2].deferred_rows == (DeferredRow(0, "COPY_IN_SAME_STEP"),)


def test_s16_no_block_is_source_and_target_in_one_step() -> None:
    """A child of a sequence that copies in this step cannot copy the copy."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.fork(1, 2, 6)
    outcomes = driver.step(
        decode_entry((2, 6, 6, [7])), fork_entry(2, 3, 6), decode_entry((3, 6, 6, [8]))
    ).outcomes
    assert copies(outcomes[0]) == [(2, 2, 3, 2, 1)]
    assert isinstance(outcomes[2], DecodeOutcome)
    assert outcomes[2].deferred_rows == (DeferredRow(0, "COPY_IN_SAME_STEP"),)


def test_s16_a_copy_is_part_of_the_demand() -> None:
    """Without a block for it the writer is refused, and nothing changes (S11)."""
    driver = Driver(block_count=3)
    driver.open(1, PROMPT)
    driver.fork(1, 2, 6)
    refusal = driver.refused(extend_entry(2, [7], known=6, scheduled=6))
    assert refusal.reason == "POOL_EXHAUSTED"
    assert dict(refusal.numbers) == {"needed_count": 1, "available_count": 0}
    (outcome,) = driver.step(decode_entry(driver.row(1, 7))).outcomes
    assert isinstance(outcome, DecodeOutcome)
    assert outcome.deferred_rows == (DeferredRow(0, "POOL_EXHAUSTED", 1, 0),)


def test_s22_source_and_target_of_a_copy_are_not_handed_out_again_in_its_step() -> None:
    """Both are free once their sequences are closed, yet only the next step gets them."""
    driver = Driver(block_count=6)
    driver.open(1, PROMPT)
    driver.fork(1, 2, 6)
    outcomes = driver.step(
        decode_entry(driver.row(2, 7)),
        close_entry(1),
        close_entry(2),
        open_entry(3, [50] * 9),
        open_entry(4, [60] * 8),
    ).outcomes
    assert outcomes[1:3] == (CloseOutcome(), CloseOutcome())
    assert isinstance(outcomes[3], Refusal)
    assert dict(outcomes[3].numbers) == {"needed_count": 3, "available_count": 2}
    assert isinstance(outcomes[4], OpenOutcome)
    assert sorted(driver.table(4)) == [4, 5]
    driver.open(5, [50] * 9)


def test_s16_a_writer_copies_what_a_sequence_closed_in_this_step_still_reads() -> None:
    """In place it would overwrite drafts that the closed sequence's row reads in the same pass."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.extend(1, [], draft_token_count=2)
    driver.fork(1, 2, 6)
    outcomes = driver.step(
        decode_entry((1, 8, 6, [])), close_entry(1), decode_entry((2, 6, 6, [9]))
    ).outcomes
    assert copies(outcomes[2]) == [(2, 2, 4, 2, 1)]
    assert 2 in driver.free_order()


def test_s14_a_rollback_never_reaches_what_is_shared_with_a_fork() -> None:
    """Drafts behind the fork's end are rejected and written anew in a copy."""
    driver = Driver()
    driver.open(1, PROMPT[:5])
    driver.extend(1, [], draft_token_count=2)
    assert driver.sequence(1).scheduled_count == 7
    driver.fork(1, 2, 5)
    refusal = driver.refused(fork_entry(1, 3, 6))
    assert refusal.reason == "POSITION_MISMATCH"
    assert dict(refusal.numbers) == {"known_count": 5, "scheduled_count": 7, "token_count": 6}
    outcome = driver.extend(1, [6], rollback_to_token_count=5)
    assert copies(outcome) == [(1, 2, 3, 1, 1)]
    assert driver.table(2) == [1, 2]


def test_s16_a_cut_sequence_forks_what_it_has_left() -> None:
    """The child stands on published blocks, so it needs no extend."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(decode_entry((1, 6, 6, [7])))
    driver.step(failed=(2, 2), executed=1)
    assert driver.sequence(1).cut
    assert driver.refused(fork_entry(1, 2, 5)).reason == "POSITION_MISMATCH"
    driver.fork(1, 2, 4)
    assert driver.table(2) == [1]
    assert not driver.sequence(2).cut
    driver.decode(2, 9)


def test_s16_a_failed_step_takes_the_shared_partial_block_from_all() -> None:
    """Every table falls to its published run, and nothing stays held beside it."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.step(fork_entry(1, 2, 6), decode_entry((1, 6, 6, [7])))
    reply = driver.step(failed=(2, 2), executed=1)
    assert [(cut.handle, cut.scheduled_count) for cut in reply.cut_sequences] == [(1, 4), (2, 4)]
    assert driver.table(1) == driver.table(2) == [1]
    assert held_count(driver) == 1
    assert copies(driver.extend(2, [9])) == []


def test_s16_forks_of_uncacheable_sequences_share_privately() -> None:
    """The child is uncacheable too; its parent's blocks stay held while it lives."""
    driver = Driver()
    driver.open(1, PROMPT, identity=Identity(has_unknown_fields=True))
    driver.fork(1, 2, 6)
    driver.close(1)
    assert driver.sequence(2).uncacheable
    assert driver.table(2) == [1, 2]
    assert held_count(driver) == 2
    assert copies(driver.extend(2, [7, 8, 9])) == []
    driver.step()
    assert driver.published() == {}


def test_s4_forks_of_sequences_of_an_older_version_publish_nothing() -> None:
    """The child keeps its parent's version, and shares its blocks as before."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.fork(1, 2, 5)
    driver.pool.set_model_version("w2")
    driver.fork(2, 3, 5)
    driver.extend(3, [6, 7, 8, 9])
    driver.step()
    assert driver.published() == {}
    assert driver.sequence(3).model_version == ""
    for handle in (1, 2, 3):
        driver.close(handle)
    assert sorted(driver.free_order()) == list(range(1, 11))


def test_a_fork_is_refused_where_names_or_its_parent_forbid_it() -> None:
    """Unknown parents, names in use: nothing changes."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, [9])
    assert driver.refused(fork_entry(7, 3, 1)).reason == "SEQUENCE_NOT_FOUND"
    assert driver.refused(fork_entry(1, 2, 1, sequence_id="x")).reason == "SEQUENCE_EXISTS"
    assert driver.refused(fork_entry(1, 3, 1, sequence_id="s2")).reason == "SEQUENCE_EXISTS"


def test_s16_a_draining_pool_still_forks() -> None:
    """A fork is part of an answer that runs."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.pool.drain()
    driver.fork(1, 2, 6)
    assert driver.table(2) == [1, 2]


def test_s16_eight_samples_hold_the_prompt_once_and_a_tail_each() -> None:
    """1,028 prompt tokens in 64 full blocks and one partial, then 40 tokens of each sample."""
    driver = Driver(block_count=200, block_size=16)
    driver.open(1, [7] * 1_028)
    driver.step(*(fork_entry(1, handle, 1_028) for handle in range(2, 9)))
    assert held_count(driver) == 65
    for position in range(40):
        driver.step(decode_entry(*(driver.row(h, 100 * h + position) for h in range(1, 9))))
    # Each has 44 tokens behind the 64 full blocks: two full blocks and one partial.
    assert held_count(driver) == 64 + 8 * 3
    driver.step(*(close_entry(handle) for handle in range(1, 9)))
    assert held_count(driver) == 0


def test_s16_random_beams_leave_no_held_block() -> None:
    """Beams that fork and die at random share what they have in common, and nothing more."""
    chance = random.Random(5)
    driver = Driver(block_count=400, block_size=4)
    driver.open(1, list(range(30)))
    texts = {1: list(range(30))}
    handle_last = 1
    for _ in range(120):
        parents = [chance.choice(list(texts)) for _ in range(4)]
        losers = [handle for handle in texts if handle not in parents]
        forks = []
        for parent in {one for one in parents if parents.count(one) > 1}:
            for _ in range(parents.count(parent) - 1):
                handle_last += 1
                forks.append((parent, handle_last))
                texts[handle_last] = list(texts[parent])
        for loser in losers:
            del texts[loser]
        reply = driver.step(
            *(close_entry(loser) for loser in losers),
            *(fork_entry(parent, child, len(texts[parent])) for parent, child in forks),
        )
        assert not any(isinstance(outcome, Refusal) for outcome in reply.outcomes)
        rows = []
        for handle, text in texts.items():
            token_id = chance.randrange(50)
            rows.append((handle, len(text), len(text), [token_id]))
            text.append(token_id)
        (outcome,) = driver.step(decode_entry(*rows)).outcomes
        assert isinstance(outcome, DecodeOutcome)
        assert outcome.deferred_rows == ()
        held = {block for handle in texts for block in driver.table(handle)}
        assert held_count(driver) == len(held)
    driver.step(*(close_entry(handle) for handle in texts))
    driver.step()
    assert held_count(driver) == 0
    assert driver.pool.flush() > 0


def test_s19_a_borrowed_block_that_becomes_idle_does_not_outlive_the_places_before_it() -> None:
    """The writer has copies of its own of these places, so nobody holds the indexed blocks."""
    driver = Driver(block_count=20, block_size=2)
    driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT, skip_cache_read=True), executed=0)
    driver.step(close_entry(1), extend_entry(2, [7, 8], known=6, scheduled=6), executed=0)
    driver.step(fork_entry(2, 3, 7), close_entry(2), executed=0)
    driver.step(decode_entry((3, 7, 7, [9])), executed=0)
    assert driver.free_order()[-4:] == [7, 3, 2, 1], "the deepest place goes first"
