"""The free order: which block is handed out next (rules S13, S17).

A doubly linked list of segments. A segment is a run of blocks without cached content, or the lane
of an idle node, whose blocks go out tail first. Cost is per segment, not per block. Where an
eviction policy has several bands (S20), the list also has a mark at the end of each but the last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixd.controller.core.run_claims import RunClaims


class Segment:
    """A link of the free order. `withheld`: not handed out before the current step ends (S22)."""

    __slots__ = ("following", "preceding", "withheld")

    def __init__(self) -> None:
        self.preceding: Segment | None = None
        self.following: Segment | None = None
        self.withheld = False

    @property
    def is_linked(self) -> bool:
        """Whether the segment stands in the free order."""
        return self.following is not None


class PlainRun(Segment):
    """Blocks without cached content: first `stack` from its end, then the range [start, end)."""

    __slots__ = ("end", "stack", "start")

    def __init__(self, stack: list[int], *, start: int = 0, end: int = 0) -> None:
        super().__init__()
        self.stack = stack
        self.start = start
        self.end = end

    def __len__(self) -> int:
        return len(self.stack) + self.end - self.start

    def take(self, count: int) -> list[int]:
        """Take at most `count` blocks, in order."""
        stack_count = min(count, len(self.stack))
        taken = [self.stack.pop() for _ in range(stack_count)]
        range_end = min(self.end, self.start + count - stack_count)
        taken.extend(range(self.start, range_end))
        self.start = range_end
        return taken

    def block_ids(self) -> list[int]:
        """Return the blocks in the order in which they would be taken."""
        return [*reversed(self.stack), *range(self.start, self.end)]


class CachedRun(Segment):
    """A run of cached blocks that may be linked; handed out from its end.

    `band` is the band of the free order in which it is linked, or was last; `claims` are what that
    followed from, None where nothing is claimed.
    """

    __slots__ = ("band", "block_ids", "claims")

    def __init__(self, block_ids: array[int]) -> None:
        super().__init__()
        self.block_ids = block_ids
        self.band = 0
        self.claims: RunClaims | None = None


class FreeOrder:
    """All blocks that no sequence holds, in the order in which they would be handed out.

    Invariants: `plain_count` and `cached_count` are the lengths of all linked runs of each kind;
    `withheld_count` is the length of the withheld ones; no linked run is empty; a cached run stands
    before the end of its band and behind the ends of those below.
    """

    def __init__(self, block_count: int, *, band_count: int = 1) -> None:
        self._end = Segment()
        self._end.preceding = self._end.following = self._end
        self._band_ends = [*(Segment() for _ in range(band_count - 1)), self._end]
        for mark in reversed(self._band_ends[:-1]):
            self._link(mark, after=self._end)
        self.plain_count = 0
        self.cached_count = 0
        self.withheld_count = 0
        self._withheld: list[Segment] = []
        run = PlainRun([], start=1, end=block_count)
        self._link(run, after=self._end)
        self.plain_count = len(run)

    @property
    def available_count(self) -> int:
        """Blocks that may be handed out now."""
        return self.plain_count + self.cached_count - self.withheld_count

    def append(self, run: CachedRun) -> None:
        """Put a cached run at the end of its band: it is the most recently used one."""
        assert run.block_ids
        last = self._band_ends[run.band].preceding
        assert last is not None
        self._link(run, after=last)
        self.cached_count += len(run.block_ids)

    def insert_after(self, run: CachedRun, *, place: CachedRun) -> None:
        """Put the upper part of a split run behind its lower part; neither count changes."""
        self._link(run, after=place)
        if place.withheld:
            run.withheld = True
            self._withheld.append(run)

    def remove(self, run: CachedRun) -> None:
        """Take a cached run out: somebody holds it now."""
        self._unlink(run)
        self.cached_count -= len(run.block_ids)
        if run.withheld:
            run.withheld = False
            self.withheld_count -= len(run.block_ids)

    def absorb(self, run: CachedRun, *, absorbed: CachedRun) -> None:
        """Unlink a run whose blocks were appended to its neighbour; no count changes."""
        assert absorbed.following is run
        self._unlink(absorbed)
        absorbed.withheld = False

    def push_front(self, block_ids: Sequence[int]) -> None:
        """Put blocks without cached content at the very front, in this order."""
        if not block_ids:
            return
        first = self._end.following
        if isinstance(first, PlainRun) and not first.withheld:
            first.stack.extend(reversed(block_ids))
        else:
            self._link(PlainRun(list(reversed(block_ids))), after=self._end)
        self.plain_count += len(block_ids)

    def push_front_withheld(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the very front that may not be handed out before the step ends."""
        if not block_ids:
            return
        run = PlainRun(list(reversed(block_ids)))
        self._link(run, after=self._end)
        self.plain_count += len(block_ids)
        self._withhold(run, len(block_ids))

    def withhold(self, run: CachedRun) -> None:
        """Keep a linked run from being handed out before the step ends."""
        if not run.withheld:
            self._withhold(run, len(run.block_ids))

    def end_step(self) -> None:
        """Let everything that was withheld be handed out again."""
        for segment in self._withheld:
            segment.withheld = False
        self._withheld.clear()
        self.withheld_count = 0

    def become_plain(self, run: CachedRun) -> None:
        """Forget the content of a linked run; its blocks keep their place (S13)."""
        assert run.preceding is not None
        plain = PlainRun(list(run.block_ids))
        self._link(plain, after=run)
        self._unlink(run)
        self.cached_count -= len(plain)
        self.plain_count += len(plain)
        if run.withheld:
            plain.withheld = True
            self._withheld.append(plain)

    def take_plain(self, run: PlainRun, count: int) -> list[int]:
        """Take at most `count` blocks from a run."""
        taken = run.take(count)
        self.plain_count -= len(taken)
        if len(run) == 0:
            self._unlink(run)
        return taken

    def pop_plain(self) -> int | None:
        """Take the first block if it has no cached content; None where it has."""
        first = self._end.following
        if not isinstance(first, PlainRun) or first.withheld:
            return None
        if first.stack:
            block_id = first.stack.pop()
        else:
            block_id = first.start
            first.start += 1
        self.plain_count -= 1
        if not first.stack and first.start == first.end:
            self._unlink(first)
        return block_id

    def shrink(self, run: CachedRun, count: int) -> None:
        """Account for the last `count` blocks of a linked run, which are about to be evicted."""
        if count == len(run.block_ids):
            self._unlink(run)
        self.cached_count -= count

    def first(self) -> PlainRun | CachedRun:
        """Return the first segment that may be handed out. There must be one."""
        first = self._end.following
        while first is not self._end:
            assert first is not None
            if not first.withheld and isinstance(first, (PlainRun, CachedRun)):
                return first
            first = first.following
        raise AssertionError("nothing may be handed out")

    def __iter__(self) -> Iterator[PlainRun | CachedRun]:
        segment = self._end.following
        while segment is not self._end:
            assert segment is not None
            following = segment.following
            if isinstance(segment, (PlainRun, CachedRun)):
                yield segment
            segment = following

    def bands(self) -> Iterator[tuple[PlainRun | CachedRun, int]]:
        """Walk all segments in order, each with the band in whose stretch it stands."""
        band = 0
        segment = self._end.following
        while segment is not self._end:
            assert segment is not None
            if isinstance(segment, (PlainRun, CachedRun)):
                yield segment, band
            else:
                band += 1
            segment = segment.following

    def block_ids(self) -> list[int]:
        """Return all blocks in order."""
        order: list[int] = []
        for segment in self:
            if isinstance(segment, PlainRun):
                order.extend(segment.block_ids())
            else:
                order.extend(reversed(segment.block_ids))
        return order

    def _withhold(self, segment: Segment, block_count: int) -> None:
        segment.withheld = True
        self._withheld.append(segment)
        self.withheld_count += block_count

    def _link(self, segment: Segment, *, after: Segment) -> None:
        assert segment.following is None
        assert after.following is not None
        segment.preceding = after
        segment.following = after.following
        after.following.preceding = segment
        after.following = segment

    def _unlink(self, segment: Segment) -> None:
        assert segment.preceding is not None
        assert segment.following is not None
        segment.preceding.following = segment.following
        segment.following.preceding = segment.preceding
        segment.preceding = None
        segment.following = None
