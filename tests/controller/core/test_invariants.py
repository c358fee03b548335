"""The invariants notice what is broken."""

from collections.abc import Callable

import pytest

from prefixd.controller.core import invariants
from prefixd.controller.core.errors import InvariantBroken
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.node import Node
from prefixd.controller.core.pool import Pool
from tests.controller.core.driver import Driver, close_entry


def first_node(pool: Pool) -> Node:
    """Returns a top node of the index."""
    return next(iter(pool.state.index.nodes()))


def lose_a_holder(pool: Pool) -> None:
    """Counts one holder too few."""
    first_node(pool).lane.holder_count += 1


def change_a_token(pool: Pool) -> None:
    """Lets a node stand for another content."""
    first_node(pool).tokens[0] ^= 1


def change_a_digest(pool: Pool) -> None:
    """Stores a wrong digest."""
    pool.digests.hash_all()
    first_node(pool).digests[0] ^= 1


def forget_a_free_block(pool: Pool) -> None:
    """Loses a block."""
    pool.state.order.pop_plain()


def miscount_free_blocks(pool: Pool) -> None:
    """Counts a free block that is none."""
    pool.state.order.plain_count += 1


def miscount_published_blocks(pool: Pool) -> None:
    """Counts a published block that is none."""
    pool.state.index.published_count += 1


def free_a_held_block(pool: Pool) -> None:
    """Hands a held block back."""
    pool.state.order.push_front([first_node(pool).lane.block_ids[0]])


def give_one_block_to_two(pool: Pool) -> None:
    """Puts one private block into two tables."""
    first, second = list(pool.state.sequences.values())[:2]
    first.private_block_ids[-1] = second.private_block_ids[-1]


def write_beyond_the_plan(pool: Pool) -> None:
    """Says that a position is written that was not scheduled."""
    pool.state.columns.written[0] = pool.state.columns.scheduled[0] + 1


def withhold_after_the_step(pool: Pool) -> None:
    """Keeps blocks from later steps."""
    pool.state.order.push_front_withheld([pool.state.order.pop_plain() or 0])


def lose_a_handle(pool: Pool) -> None:
    """Lets the maps of sequences disagree."""
    pool.state.rows.popitem()


def evict_a_parent_first(pool: Pool) -> None:
    """Moves an idle parent in front of its idle child."""
    node = next(node for node in pool.state.index.nodes() if node.lane.is_linked and node.children)
    child = next(iter(node.children.values()))
    pool.state.order.remove(child.lane)
    pool.state.order.append(child.lane)


def forget_whose_claim_it_is(pool: Pool) -> None:
    """Lets a claim wait for its end whose run has none."""
    claim = next(pool.state.claims.ending())
    assert claim.run is not None
    assert claim.run.claims is not None
    claim.run.claims.claim = None


def test_a_claim_that_waits_for_nobody_is_found() -> None:
    """A claim with an end is that of a run."""
    driver = Driver(block_count=40, eviction_policy="retention")
    driver.open(1, list(range(10)), retention_hint=RetentionHint(Continuation.EXPECTED))
    driver.close(1)
    forget_whose_claim_it_is(driver.pool)
    with pytest.raises(InvariantBroken, match="stands nowhere"):
        invariants.check(driver.pool)


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_holder,
        change_a_token,
        change_a_digest,
        forget_a_free_block,
        miscount_free_blocks,
        miscount_published_blocks,
        free_a_held_block,
        give_one_block_to_two,
        write_beyond_the_plan,
        withhold_after_the_step,
        lose_a_handle,
        evict_a_parent_first,
    ],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_found(damage: Callable[[Pool], None]) -> None:
    """A sound pool passes; the damaged one does not."""
    driver = Driver(block_count=40)
    driver.open(1, list(range(10)))
    driver.open(2, [*list(range(8)), 9, 9, 9])
    driver.open(3, list(range(50, 60)))
    driver.open(4, [*range(50, 54), 7, 7, 7, 7, 7])
    driver.step(close_entry(3), close_entry(4))
    driver.step()
    invariants.check(driver.pool)
    damage(driver.pool)
    with pytest.raises(InvariantBroken):
        invariants.check(driver.pool)
