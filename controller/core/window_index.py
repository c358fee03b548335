"""The index of the sliding-window groups: a trie of places (rule S23).

Full blocks enter it as those of full attention do; evicting one loses nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Run

from prefixd.controller.core.events import EventLog
from prefixd.controller.core.identity import RootKey, SequenceKeys
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.step_log import EXECUTED
from prefixd.controller.core.window_blocks import PlaceKey, WindowBlock, WindowPlace
from prefixd.controller.core.window_digests import WindowDigests


class WindowIndex:
    """Which window block holds which place; `WindowTwins` says which one of several does.

    Invariants: `pending` has exactly the full blocks, indexed or not, whose step is not executed;
    every place is needed; `published_count` counts the indexed blocks that are written. Whatever
    changes their set says so in `events`; between two blocks of a group nothing is promised, for
    each comes and goes alone (S25).
    """

    def __init__(self, digests: WindowDigests, events: EventLog, *, block_bytes: int) -> None:
        self.roots: dict[RootKey, WindowPlace] = {}
        self.pending: dict[WindowBlock, None] = {}
        self.published_count = 0
        self.digests = digests
        self._events = events
        self._block_bytes = block_bytes

    @property
    def pending_count(self) -> int:
        """Indexed blocks whose step is not executed."""
        return sum(block.place is not None for block in self.pending)

    def places(self, keys: SequenceKeys, packed_tokens: bytes, end: int) -> Iterator[WindowPlace]:
        """Walk the known places of a prompt's first `end` blocks, until one is missing."""
        place = self.roots.get(keys.root_key)
        for at in range(end):
            if place is None:
                return
            tokens = packed_tokens[at * self._block_bytes : (at + 1) * self._block_bytes]
            place = place.children.get((tokens, keys.varied_keys.get(at, ())))
            if place is not None:
                yield place

    def place_at(self, keys: SequenceKeys, packed_tokens: bytes, end: int) -> WindowPlace | None:
        """Return the place behind a prompt's first `end` blocks; a root for 0."""
        if end == 0:
            return self.roots.get(keys.root_key)
        places = list(self.places(keys, packed_tokens, end))
        return places[-1] if len(places) == end else None

    def enter(self, blocks: Iterable[tuple[WindowBlock, WindowPlace, StepId]]) -> None:
        """Let full blocks have their places, or be twins; a step writes each of them."""
        published: list[WindowBlock] = []
        for block, place, step_id in blocks:
            assert block.place is None
            assert block.twin_of is None
            block.step_id = step_id
            if step_id != EXECUTED:
                self.pending[block] = None
            if block.group_index in place.blocks:
                block.twin_of = place
                place.twins.append(block)
                continue
            place.blocks[block.group_index] = block
            block.place = place
            if step_id == EXECUTED:
                published.append(block)
        self.tell_stored(published)

    def exchange(self, old: WindowBlock, twin: WindowBlock) -> None:
        """Let a twin have the place of an indexed block, which has none then."""
        place = old.place
        assert place is not None
        assert twin.twin_of is place
        place.twins.remove(twin)
        twin.twin_of = None
        twin.place = place
        place.blocks[twin.group_index] = twin
        old.place = None

    def leave_twins(self, block: WindowBlock) -> None:
        """Say that a block is a twin no longer."""
        place = block.twin_of
        assert place is not None
        place.twins.remove(block)
        block.twin_of = None
        self._prune(place)

    def is_pending(self, block: WindowBlock) -> bool:
        """Tell whether the step that writes a full block is not executed yet."""
        return block in self.pending

    def is_published(self, block: WindowBlock) -> bool:
        """Tell whether a block is indexed and written."""
        return block.place is not None and block not in self.pending

    def publish(self, step_id: StepId) -> list[WindowBlock]:
        """Say that a step was executed; returns the full blocks that it wrote, twins too."""
        written = [block for block in self.pending if block.step_id <= step_id]
        for block in written:
            del self.pending[block]
        self.tell_stored([block for block in written if block.place is not None])
        return written

    def tell_stored(self, blocks: list[WindowBlock]) -> None:
        """Say that indexed blocks are published, one event for each run of places."""
        self.published_count += len(blocks)
        blocks.sort(key=lambda block: block.group_index)
        run: list[WindowPlace] = []
        group_index = 0
        for block in blocks:
            place = block.place
            assert place is not None
            if run and (block.group_index != group_index or place.parent is not run[-1]):
                self._tell_run_stored(group_index, run)
                run = []
            group_index = block.group_index
            run.append(place)
        if run:
            self._tell_run_stored(group_index, run)

    def _tell_run_stored(self, group_index: int, run: Run[WindowPlace]) -> None:
        self.digests.digest(run[-1])
        self._events.store_run(
            group_index,
            parent_hash=self.digests.parent_digest(run[0]),
            digests=b"".join(place.digest for place in run),
            token_ids=b"".join(place.tokens for place in run),
            root_key=run[0].root_key,
            varied_keys={
                at: place.varied_keys for at, place in enumerate(run) if place.varied_keys
            },
        )

    def tell_removed(self, block: WindowBlock) -> None:
        """Say that an indexed block is published no longer."""
        assert block.place is not None
        self.published_count -= 1
        self._events.remove_run(block.group_index, block.place.digest)

    def evict(self, block: WindowBlock) -> int:
        """Drop an idle block, which left the free order, for new use; returns its id."""
        self.leave_place(block)
        self.pending.pop(block, None)
        return block.block_id

    def leave_place(self, block: WindowBlock) -> None:
        """Take a block out of the index, if it is there."""
        place = block.place
        if place is None:
            return
        if block not in self.pending:
            self.tell_removed(block)
        block.place = None
        del place.blocks[block.group_index]
        self._prune(place)

    def tell_all_removed(self) -> None:
        """Say that no block is published any longer, the deepest ones first: `clear` follows."""
        digests: dict[int, bytearray] = {}
        for block in reversed(list(self.indexed())):
            if block.place is not None and block not in self.pending:
                digests.setdefault(block.group_index, bytearray()).extend(block.place.digest)
        for group_index, packed in digests.items():
            self._events.remove_run(group_index, bytes(packed))

    def _prune(self, place: WindowPlace | None) -> None:
        while place is not None and not place.is_needed:
            parent = place.parent
            self.digests.forget(place)
            if parent is None:
                if self.roots.get(place.root_key) is place:
                    del self.roots[place.root_key]
            else:
                del parent.children[place.key]
            place = parent

    def stand_at(self, sequence: Sequence, block_count: int) -> None:
        """Say that a sequence's full blocks are places now, as many as `block_count`."""
        entered_count = sequence.window_entered_count
        place = sequence.window_place
        if place is None:
            root_key = sequence.keys.root_key
            place = self.roots.setdefault(root_key, WindowPlace(None, (b"", ()), root_key))
            entered_count = 0
        for at in range(entered_count, block_count):
            key = sequence.child_key(at, block_bytes=self._block_bytes)
            child = place.children.get(key)
            if child is None:
                child = place.children[key] = WindowPlace(place, key, place.root_key)
                self.digests.note(child)
            place = child
        for _ in range(block_count, entered_count):
            assert place.parent is not None
            place = place.parent
        place.sequence_count += 1
        self.stand_nowhere(sequence)
        sequence.window_place = place
        sequence.window_entered_count = block_count

    def stand_nowhere(self, sequence: Sequence) -> None:
        """Say that a sequence has no full blocks."""
        place = sequence.window_place
        sequence.window_place = None
        sequence.window_entered_count = 0
        if place is not None:
            place.sequence_count -= 1
            self._prune(place)

    def drop_pending(self) -> None:
        """Take the unwritten blocks out of the index; `pending` still has them."""
        for block in self.pending:
            self.leave_place(block)
            if block.twin_of is not None:
                self.leave_twins(block)

    def blocks_behind(self, place: WindowPlace, group_index: int) -> list[WindowBlock]:
        """List the indexed blocks of a full-attention group behind a place, parents first: none
        stands behind a gap (S19), so no place without one is looked behind."""
        found: list[WindowBlock] = []
        waiting = [place]
        while waiting:
            for child in waiting.pop().children.values():
                block = child.blocks.get(group_index)
                if block is not None:
                    found.append(block)
                    waiting.append(child)
        return found

    def blocks_below(self, root_key: RootKey, path: Iterable[PlaceKey]) -> list[WindowBlock]:
        """List the indexed blocks at the end of a path of places and behind it."""
        place = self.roots.get(root_key)
        for key in path:
            if place is None:
                return []
            place = place.children.get(key)
        return [] if place is None else list(_subtree_blocks(place))

    def indexed(self) -> Iterator[WindowBlock]:
        """Walk all indexed blocks."""
        for root in self.roots.values():
            yield from _subtree_blocks(root)

    def all_places(self) -> Iterator[WindowPlace]:
        """Walk all places but the roots, parents before children."""
        for root in self.roots.values():
            yield from (place for place in _subtree(root) if place is not root)

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """Forget every place; the blocks in the free order are the caller's."""
        for place in self.all_places():
            for block in place.blocks.values():
                block.place = None
                if not block.holder_count:
                    self.pending.pop(block, None)
            for twin in place.twins:
                twin.twin_of = None
        for sequence in sequences:
            sequence.window_place = None
            sequence.window_entered_count = 0
        self.roots.clear()
        self.digests.unhashed.clear()
        self.published_count = 0


def _subtree(place: WindowPlace) -> Iterator[WindowPlace]:
    waiting = [place]
    while waiting:
        place = waiting.pop()
        yield place
        waiting.extend(place.children.values())


def _subtree_blocks(place: WindowPlace) -> Iterator[WindowBlock]:
    for below in _subtree(place):
        yield from below.blocks.values()
