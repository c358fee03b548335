"""Window blocks with equal content, left alone or merged (rules S15 and S23)."""

from typing import Any

from prefixd.controller.core import inspect
from prefixd.controller.core.events import BlocksRemoved, BlocksStored
from prefixd.controller.core.inspect import BlockContent
from prefixd.controller.core.messages import BlockRemap, GroupKind, GroupSpec, StepReply
from tests.controller.core.driver import (
    Driver,
    close_entry,
    extend_entry,
    fork_entry,
    open_entry,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
GROUPS = (GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, 8))


def driver_of(**spec: Any) -> Driver:
    """Returns a pool of blocks of 4 with one window of 8 tokens behind full attention."""
    return Driver(**({"block_count": 21, "groups": GROUPS} | spec))


def tables(driver: Driver, handle: int) -> list[list[int]]:
    """Returns the tables of a sequence, one per group."""
    found = inspect.block_tables(driver.pool, driver.name(handle))
    return [table.tolist() for table in found]


def content(driver: Driver, block_id: int) -> BlockContent:
    """Tells whether a block can be matched."""
    return inspect.block(driver.pool, block_id).content


def remapped(reply: StepReply) -> list[tuple[int, ...]]:
    """Returns the remaps of a step: handle, group, index in the table, old block, new block."""
    assert all(isinstance(remap, BlockRemap) for remap in reply.remaps)
    return [
        (
            remap.handle,
            remap.group_index,
            remap.block_index,
            remap.old_block_id,
            remap.new_block_id,
        )
        for remap in reply.remaps
    ]


def test_s15_a_window_block_equal_to_an_idle_one_takes_its_place_when_it_is_written() -> None:
    """As in the full-attention group; the old block goes to the very front, without an event."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.close(1)
    driver.open(2, PROMPT)
    assert tables(driver, 2) == [[1, 5], [3, 6]]
    assert content(driver, 6) is BlockContent.PRIVATE
    revision = driver.pool.revision
    driver.step()
    assert content(driver, 6) is BlockContent.PUBLISHED
    assert content(driver, 4) is BlockContent.PRIVATE
    assert driver.free_order()[:3] == [4, 2, 7]
    assert driver.pool.revision == revision


def test_s15_an_idle_window_block_survives_a_failed_step() -> None:
    """Its twin was never written."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.close(1)
    published = driver.published()
    driver.step(open_entry(2, PROMPT))
    applied = driver.pool.applied_step_id
    driver.step(executed=applied - 1, failed=(applied, applied))
    assert driver.published() == published


def test_s15_a_window_block_equal_to_a_held_one_stays_private() -> None:
    """Matches find the first one, and no event tells of the second."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    assert tables(driver, 2) == [[1, 5], [3, 6]]
    assert content(driver, 6) is BlockContent.PRIVATE
    driver.open(3, [*PROMPT, 9])
    assert tables(driver, 3)[1][:2] == [3, 4]


def test_s15_the_place_of_a_window_block_passes_to_a_living_twin() -> None:
    """When the last table with the indexed block lets go, without an event (S25)."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    revision = driver.pool.revision
    driver.close(1)
    assert content(driver, 6) is BlockContent.PUBLISHED
    assert driver.free_order()[:2] == [4, 2]
    assert driver.pool.revision == revision
    driver.close(2)
    assert driver.free_order()[-2:] == [6, 3]


def test_s15_a_place_passes_to_a_twin_when_the_window_leaves_the_indexed_block() -> None:
    """Not only a close lets go: the entry itself has the block, and its content stays cached."""
    driver = driver_of(groups=(GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, 2)))
    driver.open(1, PROMPT)
    driver.open(2, PROMPT, skip_cache_read=True)
    driver.step()
    assert tables(driver, 2)[1] == [7, 8]
    driver.decode(1, 50)
    assert content(driver, 7) is BlockContent.PUBLISHED
    assert tables(driver, 1) == [[1, 2, 3], [0, 4, 9]]


def test_s15_a_twin_of_a_window_block_is_freed_uncached_while_the_place_is_held() -> None:
    """It goes to the front; the indexed block stays."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    driver.close(2)
    assert driver.free_order()[:2] == [6, 5]
    assert content(driver, 4) is BlockContent.PUBLISHED


def test_s15_the_first_written_of_two_window_twins_has_the_place() -> None:
    """Sequence 1 writes the place as a draft, sequence 2 enters it first and writes it later."""
    driver = driver_of(block_size=1)
    driver.step(open_entry(1, [1]), extend_entry(1, [], known=1, scheduled=1, draft_token_count=1))
    driver.step(open_entry(2, [1, 5]), executed=0)
    own, others = tables(driver, 1)[1][1], tables(driver, 2)[1][1]
    assert content(driver, others) is BlockContent.PENDING
    driver.step(extend_entry(1, [5], known=1, scheduled=2), executed=1)
    assert content(driver, own) is BlockContent.PUBLISHED
    assert content(driver, others) is BlockContent.PRIVATE
    driver.step(executed=1, failed=(2, 3))
    assert content(driver, own) is BlockContent.PUBLISHED
    assert tables(driver, 2) == [[1], [2]]


def test_s13_the_place_of_an_evicted_window_block_goes_to_a_twin_that_is_being_written() -> None:
    """Removed when the old block is taken, and stored again when the twin is written (S25)."""
    driver = driver_of(block_count=9)
    driver.open(1, PROMPT)
    driver.close(1)
    driver.open(2, PROMPT)
    revision = driver.pool.revision
    driver.step(open_entry(3, range(80, 86)), executed=2)
    assert tables(driver, 3) == [[7, 8], [2, 4]]
    assert content(driver, 6) is BlockContent.PENDING
    driver.step()
    assert content(driver, 6) is BlockContent.PUBLISHED
    events = driver.pool.events.after(revision, count_max=100)
    assert [(type(event), getattr(event, "group_index", None)) for event in events][:4] == [
        (BlocksRemoved, 0),
        (BlocksRemoved, 1),
        (BlocksStored, 0),
        (BlocksStored, 1),
    ]


def test_s16_a_fork_of_a_twin_that_stays_behind_writes_without_a_copy() -> None:
    """Only the parent had the block full; the child's part of it is no twin any more."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step(fork_entry(2, 3, 6))
    driver.close(2)
    assert tables(driver, 3) == [[1, 5], [3, 6]]
    outcome = driver.extend(3, [70])
    assert outcome.plan.copies == ()
    assert content(driver, 4) is BlockContent.PUBLISHED


def test_eviction_of_a_twin_names_its_place() -> None:
    """As in the full-attention group; its sequence publishes nothing more."""
    driver = driver_of()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT)
    driver.step()
    assert driver.pool.evict_blocks(block_ids={6}, digests=frozenset()).block_count == 1
    assert content(driver, 4) is BlockContent.PRIVATE
    assert driver.sequence(1).uncacheable
    assert driver.sequence(2).uncacheable


def test_s15_written_twins_of_every_group_are_merged() -> None:
    """Each remap names its group; the blocks that were given up go to the very front."""
    driver = driver_of(merge_duplicates=True)
    driver.open(1, PROMPT)
    assert remapped(driver.step(open_entry(2, PROMPT))) == []
    assert tables(driver, 2) == [[1, 5], [3, 6]]
    assert remapped(driver.step()) == [(2, 0, 1, 5, 2), (2, 1, 1, 6, 4)]
    assert tables(driver, 2) == tables(driver, 1) == [[1, 2], [3, 4]]
    assert driver.free_order()[:2] == [6, 5]
    assert remapped(driver.step()) == []


def test_s15_an_unwritten_window_twin_is_kept_until_its_step_is_executed() -> None:
    """A failed step would lose a block that the table needs."""
    driver = driver_of(merge_duplicates=True)
    driver.open(1, PROMPT)
    driver.step(open_entry(2, PROMPT))
    assert remapped(driver.step(executed=1)) == []
    assert remapped(driver.step(executed=1, failed=(2, 3))) == []
    assert tables(driver, 2) == [[1], [3]]


def test_s15_a_twin_that_its_window_has_passed_is_not_merged() -> None:
    """It has left the table before it was written."""
    driver = driver_of(
        merge_duplicates=True, groups=(GroupSpec(), GroupSpec(GroupKind.SLIDING_WINDOW, 2))
    )
    driver.open(1, PROMPT)
    driver.step(open_entry(2, PROMPT, skip_cache_read=True))
    driver.step(extend_entry(2, [9], known=8, scheduled=8), executed=1)
    reply = driver.step(close_entry(1), executed=3)
    assert [remap[1:3] for remap in remapped(reply)] == [(0, 0), (0, 1), (1, 1)]


def test_s16_a_fork_has_twins_whether_it_may_publish_or_not() -> None:
    """The parent has lost its second place to an operator; its first block is a twin still."""
    driver = driver_of()
    driver.open(1, PROMPT, skip_cache_read=True)
    driver.open(2, PROMPT, skip_cache_read=True)
    driver.step()
    driver.pool.evict_blocks(block_ids={tables(driver, 2)[0][1]}, digests=frozenset())
    driver.step(fork_entry(2, 3, 8))
    twin = tables(driver, 3)[1][0]
    driver.step(close_entry(2), close_entry(1))
    assert content(driver, twin) is BlockContent.PUBLISHED
