"""What every eviction policy keeps (S20), as the free order shows it."""

import random
from collections.abc import Callable, Iterator
from typing import ClassVar
from unittest import mock

import pytest

from prefixd.controller.core.errors import BlocksInUse, FieldInvalid
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.limits import RETENTION_MS_MAX, RETENTION_PRIORITY_MAX
from prefixd.controller.core.messages import CloseEntry, CloseReason, Handle
from prefixd.controller.core.policies.policy import Claim
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from tests.controller.core.driver import Driver, close_entry, open_entry
from tests.model.arbitrary_policy import Arbitrary

PROMPT = list(range(100, 113))
HINTS = (
    None,
    RetentionHint(),
    RetentionHint(Continuation.EXPECTED),
    RetentionHint(Continuation.OVER),
    RetentionHint(priority=RETENTION_PRIORITY_MAX),
    RetentionHint(Continuation.EXPECTED, priority=2, duration_ms=30),
    RetentionHint(priority=1, duration_ms=10),
)
Pools = Callable[..., Driver]


@pytest.fixture(params=[*EVICTION_POLICIES, "arbitrary"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Makes pools of one policy: of each that is registered, and of one that answers anything."""

    def make(**spec: object) -> Driver:
        return Driver(eviction_policy=request.param, **spec)

    with mock.patch.dict(EVICTION_POLICIES, {"arbitrary": Arbitrary}):
        yield make


def close(driver: Driver, handle: int, hint: RetentionHint | None) -> None:
    """Closes a sequence with a hint, some time after the last step."""
    driver.now_ms += 7
    driver.step(CloseEntry(Handle(handle), CloseReason.FINISHED, hint))


def cached(driver: Driver) -> set[int]:
    """Names the blocks that are published."""
    return set(driver.published())


@pytest.mark.parametrize("hint", HINTS)
def test_s20_s13_content_is_lost_only_when_its_block_is_taken(
    pools: Pools, hint: RetentionHint | None
) -> None:
    """Closing and matching lose nothing; fresh ids ascend; the first of the order goes first."""
    driver = pools()
    assert driver.free_order() == list(range(1, 11))
    driver.open(1, PROMPT)
    close(driver, 1, hint)
    assert cached(driver) == {1, 2, 3}
    driver.open(2, [7] * 28)
    assert cached(driver) - {*driver.table(2)} == {1, 2, 3}
    expected = driver.free_order()[:1]
    driver.extend(2, [7])
    assert driver.table(2)[-1:] == expected


@pytest.mark.parametrize("hint", HINTS)
def test_s20_s17_uncached_blocks_come_first_and_a_table_goes_tail_first(
    pools: Pools, hint: RetentionHint | None
) -> None:
    """No claim puts a prefix before its suffix, or anything before blocks without content."""
    driver = pools()
    driver.open(1, PROMPT, lookahead_slot_count=8)
    close(driver, 1, hint)
    assert driver.free_order() == [6, 5, 4, 7, 8, 9, 10, 3, 2, 1]


@pytest.mark.parametrize("hint", HINTS)
def test_s20_s18_a_shared_block_is_evictable_only_without_holders(
    pools: Pools, hint: RetentionHint | None
) -> None:
    """The first close leaves the shared prefix held; a hit takes it out of the order again."""
    driver = pools()
    driver.open(1, PROMPT)
    driver.open(2, PROMPT[:8] + [9] * 5)
    close(driver, 1, hint)
    assert not {1, 2} & set(driver.free_order())
    close(driver, 2, None)
    assert {1, 2} <= set(driver.free_order())
    driver.open(3, PROMPT[:9])
    assert not {1, 2} & set(driver.free_order())


@pytest.mark.parametrize("seed", range(6))
def test_s20_s19_nothing_is_handed_out_before_what_is_cached_behind_it(
    pools: Pools, seed: int
) -> None:
    """In a random tree of prompts under random hints, at every point of the free order."""
    chance = random.Random(seed)
    driver = pools(block_count=40)
    for handle in range(1, 60):
        token_ids = [chance.randrange(2) for _ in range(chance.randrange(4, 7))]
        driver.step(open_entry(handle, [one for one in token_ids for _ in range(4)]))
        close(driver, handle, chance.choice(HINTS))
        rank = {block_id: at for at, block_id in enumerate(driver.free_order())}
        by_hash = {block.block_hash: block for block in driver.blocks() if block.block_hash}
        for block in by_hash.values():
            parent = by_hash.get(block.parent_hash) if block.parent_hash else None
            if parent is not None:
                assert rank[block.block_id] < rank[parent.block_id]


def test_s20_s21_a_flush_empties_the_index_and_keeps_the_order(pools: Pools) -> None:
    """It is refused while a block is held; then nothing is claimed any more."""
    driver = pools()
    for handle, hint in enumerate(HINTS[1:4], start=1):
        driver.open(handle, [handle] * 9)
        if handle < 3:
            close(driver, handle, hint)
    driver.step()
    with pytest.raises(BlocksInUse):
        driver.pool.flush()
    close(driver, 3, None)
    driver.step()
    before = driver.free_order()
    assert driver.pool.flush() == 6
    assert driver.free_order() == before
    driver.open(10, [5] * 9)
    assert driver.table(10) == before[:3]


@pytest.mark.parametrize("hint", HINTS)
def test_s20_s22_what_a_step_reads_is_not_handed_out_within_it(
    pools: Pools, hint: RetentionHint | None
) -> None:
    """A sequence that is opened and closed by one step leaves its blocks to the next one."""
    driver = pools(block_count=6)
    close_now = CloseEntry(Handle(1), CloseReason.FINISHED, hint)
    reply = driver.step(open_entry(1, PROMPT), close_now, open_entry(2, [7] * 8))
    assert reply.available_block_count == 5
    assert driver.step(close_entry(1), open_entry(2, [7] * 8)).available_block_count == 3


class LowForAMoment:
    """Claims the lowest band, for ten milliseconds."""

    band_count: ClassVar[int] = 2
    unclaimed_band: ClassVar[int] = 1

    def claim(self, hint: RetentionHint, *, reason: CloseReason, now_ms: int) -> Claim:
        """Claims it."""
        return Claim(band=0, until_ms=now_ms + 10)


def test_s20_a_claim_that_ends_raises_nothing() -> None:
    """A run that rose would stand behind what it is the end of (S19)."""
    with mock.patch.dict(EVICTION_POLICIES, {"low": LowForAMoment}):
        driver = Driver(eviction_policy="low")
    driver.open(1, PROMPT)
    close(driver, 1, None)
    before = driver.free_order()
    driver.now_ms += 10
    driver.step()
    assert driver.free_order() == before
    assert {band for _, band in driver.pool.state.order.bands()} == {0}


def test_s20_an_unknown_policy_is_refused_by_name() -> None:
    """The error names the field and what there is."""
    from prefixd.controller.core import validate

    with pytest.raises(FieldInvalid, match="'fifo', not one of lru, retention") as refused:
        validate.eviction_policy("fifo")
    assert refused.value.field == "eviction_policy"


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        (RetentionHint(priority=-1), "priority"),
        (RetentionHint(priority=RETENTION_PRIORITY_MAX + 1), "priority"),
        (RetentionHint(duration_ms=-1), "duration_ms"),
        (RetentionHint(duration_ms=RETENTION_MS_MAX + 1), "duration_ms"),
    ],
)
def test_s20_a_hint_out_of_range_is_refused_with_its_field_and_limit(
    hint: RetentionHint, field: str
) -> None:
    """In an open and in a close, whatever the policy; the step changes nothing."""
    driver = Driver()
    driver.open(1, PROMPT)
    before = driver.seen()
    for name, entry in (
        ("open", open_entry(2, PROMPT, retention_hint=hint)),
        ("close", CloseEntry(Handle(1), CloseReason.FINISHED, hint)),
    ):
        with pytest.raises(FieldInvalid) as refused:
            driver.step(entry)
        assert refused.value.field == f"entries[0].{name}.retention_hint.{field}"
        assert refused.value.numbers["high"] in (RETENTION_PRIORITY_MAX, RETENTION_MS_MAX)
    assert driver.seen() == before
