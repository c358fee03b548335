"""Giving up duplicate blocks: the pool option `merge_duplicates` (S15)."""

from prefixd.controller.core.messages import BlockRemap, CloseOutcome, OpenOutcome, StepReply
from tests.controller.core.driver import Driver, close_entry, decode_entry, fork_entry, open_entry

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def remapped(reply: StepReply) -> list[tuple[int, int, int, int]]:
    """Returns the remaps of a step: handle, index in the table, old block, new block."""
    assert all(isinstance(remap, BlockRemap) for remap in reply.remaps)
    return [
        (remap.handle, remap.block_index, remap.old_block_id, remap.new_block_id)
        for remap in reply.remaps
    ]


def test_s15_a_written_copy_is_given_up_for_the_published_block() -> None:
    """Equal prompts compute the last block twice; the step that confirms it keeps one."""
    driver = Driver(merge_duplicates=True)
    driver.open(1, PROMPT)
    assert remapped(driver.step(open_entry(2, PROMPT))) == []
    assert driver.table(2) == [1, 3]
    assert remapped(driver.step()) == [(2, 1, 3, 2)]
    assert driver.table(1) == driver.table(2) == [1, 2]
    assert driver.free_order()[0] == 3
    assert remapped(driver.step()) == []


def test_s15_without_the_option_tables_are_append_only() -> None:
    """The default keeps the copy."""
    driver = Driver()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    assert remapped(driver.step()) == []
    assert driver.table(2) == [1, 3]


def test_s15_an_unwritten_copy_is_kept_until_its_step_is_executed() -> None:
    """A failed step would lose a block that the table needs."""
    driver = Driver(merge_duplicates=True)
    driver.open(1, PROMPT)
    driver.step(open_entry(2, PROMPT))
    assert remapped(driver.step(executed=1)) == []
    assert driver.table(2) == [1, 3]
    reply = driver.step(executed=1, failed=(2, 3))
    assert remapped(reply) == []
    assert driver.table(2) == [1]


def test_s15_twins_of_one_step_are_merged_when_it_is_executed() -> None:
    """Both are written by the same step; the indexed one stays."""
    driver = Driver(merge_duplicates=True)
    driver.step(open_entry(1, PROMPT), open_entry(2, PROMPT, skip_cache_read=True))
    assert driver.table(2) == [3, 4]
    assert remapped(driver.step()) == [(2, 0, 3, 1), (2, 1, 4, 2)]
    assert driver.free_order()[:2] == [3, 4]


def test_s15_a_token_that_comes_late_merges_in_the_next_step() -> None:
    """The position was executed before its token was known: the copy is written at once."""
    driver = Driver(merge_duplicates=True)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT[:7])
    driver.step(decode_entry((2, 7, 7, [])))
    assert remapped(driver.step(decode_entry((2, 8, 7, [8])))) == []
    assert remapped(driver.step()) == [(2, 1, 3, 2)]


def test_s15_a_freed_copy_may_be_written_by_the_step_that_carries_the_remap() -> None:
    """Remaps hold before the step's entries: nothing of it reads the old block (S22)."""
    driver = Driver(merge_duplicates=True, block_count=4)
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    reply = driver.step(close_entry(1), open_entry(3, [50, 51]))
    assert remapped(reply) == [(2, 1, 3, 2)]
    assert reply.outcomes[0] == CloseOutcome()
    assert isinstance(reply.outcomes[1], OpenOutcome)
    assert driver.table(3) == [3]


def test_s15_forks_that_share_a_copy_are_both_repointed() -> None:
    """The block is free when the last table has let go."""
    driver = Driver(merge_duplicates=True)
    driver.open(1, PROMPT)
    driver.step(open_entry(2, PROMPT), fork_entry(2, 3, 8), fork_entry(2, 4, 6))
    assert driver.table(4) == [1, 3]
    assert remapped(driver.step()) == [(2, 1, 3, 2), (3, 1, 3, 2)]
    assert driver.table(4) == [1, 3], "the fork of six tokens has the block to itself now"
    assert 3 not in driver.free_order()
    driver.decode(4, 9)
    assert driver.table(4) == [1, 3]
    driver.step(*(close_entry(handle) for handle in (1, 2, 3, 4)))
    driver.step()
    assert sorted(driver.free_order()) == list(range(1, 11))


def test_s15_merging_keeps_the_held_blocks_at_what_sharing_predicts() -> None:
    """Eight equal prompts that decode the same text hold it once."""
    driver = Driver(merge_duplicates=True, block_count=100)
    driver.step(*(open_entry(handle, PROMPT) for handle in range(1, 9)))
    for token_id in range(20, 32):
        driver.step(decode_entry(*(driver.row(handle, token_id) for handle in range(1, 9))))
    driver.step()
    tables = {tuple(driver.table(handle)) for handle in range(1, 9)}
    assert len(tables) == 1
    assert len(next(iter(tables))) == 5
