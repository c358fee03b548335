"""Claims on the free order's bands (rule S20)."""

from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import CloseEntry, CloseReason, Handle
from tests.controller.core.driver import Driver, open_entry


def test_s19_a_prefix_stays_behind_what_follows_it_when_both_have_come_into_one_band() -> None:
    """Sequences part behind the first block, which leaves the lowest band, and then behind the
    second one: the first one is still handed out after it."""
    driver = Driver(block_size=1, eviction_policy="retention")
    driver.open(1, [1, 2, 3, 4])
    over = RetentionHint(Continuation.OVER)
    driver.step(CloseEntry(Handle(1), CloseReason.FINISHED, over))
    driver.step(
        open_entry(2, [1, 5], skip_cache_read=True),
        open_entry(3, [1, 2, 6], skip_cache_read=True),
    )
    assert driver.free_order()[-4:] == [4, 3, 2, 1]
