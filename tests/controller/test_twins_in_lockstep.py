"""Rare meetings of equal blocks, on the core and the naive model at once."""

import numpy as np

from prefixd.controller.core.messages import ExtendEntry, Handle, OpenOutcome, Refusal
from tests.model.pair import Pair, closing, opening


def test_s15_of_two_copies_written_by_one_step_the_older_takes_the_place() -> None:
    """The index moves to the copy that was completed first; the idle block goes to the front."""
    pair = Pair(block_count=10, block_size=2)
    pair.step(opening(1, 1, 2, 3))
    pair.confirm(closing(1))
    pair.step(opening(2, 1, 2, 3, skip_cache_read=True), opening(3, 1, 2, 3, skip_cache_read=True))
    assert pair.published() == {1}
    older, newer = pair.table(2)[0], pair.table(3)[0]
    pair.confirm()
    assert pair.published() == {older}
    assert pair.free_order()[0] == 1
    pair.confirm(closing(2))
    assert pair.published() == {newer}


def test_s15_an_evicted_place_passes_to_the_oldest_unwritten_copy() -> None:
    """The idle block is needed for new use before either copy is written."""
    pair = Pair(block_count=6, block_size=2)
    pair.step(opening(1, 1, 2, 3))
    pair.confirm(closing(1))
    pair.step(opening(2, 1, 2, skip_cache_read=True), opening(3, 1, 2, skip_cache_read=True))
    older, newer = pair.table(2)[0], pair.table(3)[0]
    pair.step(opening(4, 7, 7, 7, 7, 7, 7))
    assert pair.published() == set()
    assert set(pair.model.pending()) >= {older}
    pair.confirm()
    assert older in pair.published()
    assert newer not in pair.published()


def test_s15_a_written_copy_keeps_the_place_when_the_pending_twin_fails() -> None:
    """A position scheduled before its token was known is written first, and survives a failure."""
    pair = Pair(block_count=10, block_size=2)
    pair.step(opening(1, 1))
    pair.step(ExtendEntry(Handle(1), 1, 1, np.array([], np.uint32), draft_token_count=1))
    pair.step(opening(2, 1, 2, 9))
    pending = pair.table(2)[0]
    pair.step(ExtendEntry(Handle(1), 1, 2, np.array([2], np.uint32)))
    assert pending in {int(block) for block in pair.model.pending()}
    pair.confirm(up_to=2)
    assert pair.published() == {pair.table(1)[0]}
    pair.fail()
    assert pair.published() == {pair.table(1)[0]}
    assert pair.table(2) == []


def test_s22_blocks_released_in_a_step_can_be_matched_but_not_taken() -> None:
    """A sequence planned and closed in one step leaves blocks that only an equal prompt may use."""
    pair = Pair(block_count=5, block_size=2)
    outcomes = pair.step(
        opening(1, 1, 2, 3, 4, 5), closing(1), opening(2, 9, 9, 9), opening(3, 1, 2, 3)
    )
    assert isinstance(outcomes[2], Refusal)
    assert outcomes[2].reason == "POOL_EXHAUSTED"
    assert isinstance(outcomes[3], OpenOutcome)
    assert outcomes[3].pending_token_count == 2
    assert pair.table(3) == [1, 4]
