"""Handing out blocks and taking them back (rules S11 to S13, S17 to S19, S22)."""

from __future__ import annotations

from array import array

from prefixd.controller.core.claims import Claims
from prefixd.controller.core.free_order import FreeOrder, PlainRun
from prefixd.controller.core.index import PrefixIndex
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.node import Lane
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.statistics import Statistics
from prefixd.controller.core.twins import Twins
from prefixd.controller.core.window_blocks import WindowBlock
from prefixd.controller.core.windows import WindowGroups


class Supply:
    """The blocks that no table has, between the free order, the index and the tables."""

    def __init__(
        self,
        order: FreeOrder,
        claims: Claims,
        index: PrefixIndex,
        twins: Twins,
        windows: WindowGroups,
        statistics: Statistics,
    ) -> None:
        self._order = order
        self._claims = claims
        self._index = index
        self._twins = twins
        self._windows = windows
        self._statistics = statistics
        self._read_block_ids: set[int] = set()
        self._source_block_ids: set[int] = set()
        self._target_block_ids: set[int] = set()

    @property
    def available_count(self) -> int:
        """Blocks that may be handed out now."""
        return self._order.available_count

    def suffices(self, *, new_block_count: int, match: Match) -> bool:
        """Tell whether new blocks can be had; idle matched ones are no longer free then (S12)."""
        return new_block_count + match.idle_count <= self._order.available_count

    def take(self, block_count: int, *, now_ms: int) -> array[int]:
        """Take blocks from the front of the free order; cached ones are evicted now (S13).

        The caller has made sure that so many are available.
        """
        order = self._order
        taken: array[int] = array("q")
        while len(taken) < block_count:
            missing_count = block_count - len(taken)
            segment = order.first()
            if isinstance(segment, PlainRun):
                taken.extend(order.take_plain(segment, missing_count))
                continue
            if isinstance(segment, WindowBlock):
                age_ms = now_ms - segment.last_use_ms
                self._statistics.count_eviction(age_ms=age_ms, block_count=1)
                order.shrink(segment, 1)
                self._claims.leave_window(segment)
                taken.append(self._windows.evict(segment))
                continue
            assert isinstance(segment, Lane)
            count = min(missing_count, len(segment.block_ids))
            self._statistics.count_eviction(age_ms=now_ms - segment.last_use_ms, block_count=count)
            order.shrink(segment, count)
            if segment.twins:
                taken.append(self._twins.replace(segment))
            else:
                taken.extend(self._index.evict_tail(segment, count))
        return taken

    def take_one(self, *, now_ms: int) -> int:
        """Take one block, as `take` does."""
        block_id = self._order.pop_plain()
        return self.take(1, now_ms=now_ms)[0] if block_id is None else block_id

    def release(self, sequence: Sequence, *, now_ms: int, step_id: StepId, is_read: bool) -> None:
        """Take back a whole table, from its end (S17).

        `is_read`: the step `step_id` reads or writes the blocks, so it must not hand them out.
        """
        uncached: list[int] = []
        self._release_private(sequence, uncached, now_ms=now_ms, step_id=step_id, is_read=is_read)
        for node, start in list(sequence.path()):
            lane = node.lane
            if is_read:
                # The place of an own twin too: what follows it must not outlive it (S19).
                lane.read_step_id = step_id
            if start in sequence.twins:
                own_block_id = self._twins.drop_twin(sequence, lane, start)
                self._leave_table(own_block_id, uncached, is_read=is_read)
                if lane.is_linked:
                    self._order.remove(lane)
                    self._append(lane, now_ms=now_ms, step_id=step_id)
                continue
            self._leave_lane(lane, uncached, now_ms=now_ms, step_id=step_id)
        self._push_front(uncached, is_read=is_read)
        self._windows.release(sequence, now_ms=now_ms, step_id=step_id, is_read=is_read)

    def _release_private(
        self,
        sequence: Sequence,
        uncached: list[int],
        *,
        now_ms: int,
        step_id: StepId,
        is_read: bool,
    ) -> None:
        lane = sequence.borrowed
        first = 0 if lane is None else 1
        for block_id in reversed(sequence.private_block_ids[first:]):
            self._leave_table(block_id, uncached, is_read=is_read)
        if lane is not None:
            if is_read:
                lane.read_step_id = step_id
            self._leave_lane(lane, uncached, now_ms=now_ms, step_id=step_id)

    def take_back(
        self, sequence: Sequence, lane: Lane, *, now_ms: int, step_id: StepId
    ) -> list[int]:
        """Take the block that a sequence borrowed back after a failed step.

        Returns it where nobody else holds it and it was never written.
        """
        uncached: list[int] = []
        if lane.pending:
            lane.holder_count -= 1
            if lane.holder_count == 0:
                uncached.extend(lane.block_ids)
        else:
            self._leave_lane(lane, uncached, now_ms=now_ms, step_id=step_id)
            if lane.is_linked:
                self._outlive(sequence, now_ms=now_ms, step_id=step_id, is_read=False)
        return uncached

    def leave(self, lane: Lane, *, now_ms: int, step_id: StepId) -> list[int]:
        """Let a table's end go that is written; returns what is not cached then."""
        uncached: list[int] = []
        self._leave_lane(lane, uncached, now_ms=now_ms, step_id=step_id)
        return uncached

    def _leave_lane(self, lane: Lane, uncached: list[int], *, now_ms: int, step_id: StepId) -> None:
        lane.holder_count -= 1
        if lane.holder_count:
            return
        indexed_block_id = lane.block_ids[0]
        was_read = lane.read_step_id == step_id
        if lane.twins and self._twins.pass_on(lane):
            uncached.append(indexed_block_id)
            if was_read:
                self._read_block_ids.add(indexed_block_id)
        else:
            self._append(lane, now_ms=now_ms, step_id=step_id)

    def replace_shared(
        self,
        sequence: Sequence,
        block_index: int,
        block_id: int,
        *,
        now_ms: int,
        step_id: StepId,
        is_read: bool,
    ) -> None:
        """Put a block into a table in place of a shared one, whose content is copied (S16).

        Neither is handed out before the step ends (S22). `is_read`: an earlier entry of the step
        made the sequence read the shared block.
        """
        at = block_index - sequence.indexed_count
        source_block_id = sequence.private_block_ids[at]
        sequence.private_block_ids[at] = block_id
        self._source_block_ids.add(source_block_id)
        self._target_block_ids.add(block_id)
        uncached: list[int] = []
        lane = sequence.borrowed
        if lane is None:
            self._leave_table(source_block_id, uncached, is_read=is_read)
        else:
            sequence.borrowed = None
            lane.read_step_id = step_id
            self._leave_lane(lane, uncached, now_ms=now_ms, step_id=step_id)
            if lane.is_linked:
                self._outlive(sequence, now_ms=now_ms, step_id=step_id, is_read=True)
        self._push_front(uncached, is_read=True)

    def _outlive(self, sequence: Sequence, *, now_ms: int, step_id: StepId, is_read: bool) -> None:
        """Move the idle places of a path behind what has become idle after it (S19).

        They are those of which the sequence has a twin of its own: it holds the others.
        """
        for node, start in list(sequence.path()):
            lane = node.lane
            if start in sequence.twins and lane.is_linked:
                if is_read:
                    lane.read_step_id = step_id
                self._order.remove(lane)
                self._append(lane, now_ms=now_ms, step_id=step_id)

    def keep_source(self, lane: Lane, *, now_ms: int, step_id: StepId) -> None:
        """Withhold an indexed block that this step copies from; an idle one is used last now."""
        lane.read_step_id = step_id
        if lane.is_linked:
            self._order.remove(lane)
            lane.last_use_ms = now_ms
            self._order.append(lane)
            self._order.withhold(lane)

    def note_target(self, block_id: int) -> None:
        """Say that this step copies into a block."""
        self._target_block_ids.add(block_id)

    def is_read(self, block_id: int) -> bool:
        """Tell whether a sequence that was planned in this step left a block that others have."""
        return block_id in self._read_block_ids

    def is_target(self, block_id: int) -> bool:
        """Tell whether this step copies into a block."""
        return block_id in self._target_block_ids

    def _append(self, lane: Lane, *, now_ms: int, step_id: StepId) -> None:
        lane.last_use_ms = now_ms
        if self._claims.has_bands:
            self._claims.place(lane)
        self._order.append(lane)
        if lane.read_step_id == step_id:
            self._order.withhold(lane)
        self._index.merge_only_child(lane.node)

    def _leave_table(self, block_id: int, uncached: list[int], *, is_read: bool) -> None:
        if self._twins.leave_table(block_id):
            uncached.append(block_id)
        elif is_read:
            self._read_block_ids.add(block_id)

    def _push_front(self, block_ids: list[int], *, is_read: bool) -> None:
        if is_read:
            self._order.push_front_withheld(block_ids)
            return
        busy_block_ids = self._read_block_ids | self._source_block_ids
        if busy_block_ids.isdisjoint(block_ids):
            self._order.push_front(block_ids)
        else:
            # This step copies some of them, or a sequence that it closed had read them.
            for block_id in reversed(block_ids):
                if block_id in busy_block_ids:
                    self._order.push_front_withheld([block_id])
                else:
                    self._order.push_front([block_id])

    def end_step(self) -> None:
        """Let later steps have the blocks that the applied step read or wrote (S22)."""
        self._order.end_step()
        self._read_block_ids.clear()
        self._source_block_ids.clear()
        self._target_block_ids.clear()
