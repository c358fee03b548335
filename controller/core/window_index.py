"""The index of the sliding-window groups: a trie of places (rule S23).

Full blocks enter it as those of full attention do. The first one keeps its place, an equal one
stays private to its table; evicting one loses nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefixd.controller.core.identity import RootKey, SequenceKeys
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.step_log import EXECUTED
from prefixd.controller.core.window_blocks import PlaceKey, WindowBlock, WindowPlace


class WindowIndex:
    """Which window block holds which place.

    Invariants: `pending` has exactly the full blocks, indexed or not, whose step is not executed;
    every place is needed.
    """

    def __init__(self, *, block_bytes: int) -> None:
        self.roots: dict[RootKey, WindowPlace] = {}
        self.pending: dict[WindowBlock, None] = {}
        self._block_bytes = block_bytes

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

    def enter(
        self, block: WindowBlock, group_index: int, place: WindowPlace, step_id: StepId
    ) -> None:
        """Let a full block, which a step writes, have a place unless an equal one has it."""
        assert block.place is None
        block.step_id = step_id
        if step_id != EXECUTED:
            self.pending[block] = None
        if group_index not in place.blocks:
            place.blocks[group_index] = block
            block.place = place

    def is_pending(self, block: WindowBlock) -> bool:
        """Tell whether the step that writes a full block is not executed yet."""
        return block in self.pending

    def publish(self, step_id: StepId) -> None:
        """Say that a step was executed."""
        for block in [block for block in self.pending if block.step_id <= step_id]:
            del self.pending[block]

    def evict(self, block: WindowBlock) -> int:
        """Drop an idle block, which left the free order, for new use; returns its id."""
        self.pending.pop(block, None)
        self.leave_place(block)
        return block.block_id

    def leave_place(self, block: WindowBlock) -> None:
        """Take a block out of the index, if it is there."""
        place = block.place
        block.place = None
        if place is not None:
            del place.blocks[block.group_index]
            self._prune(place)

    def _prune(self, place: WindowPlace | None) -> None:
        while place is not None and not place.is_needed:
            parent = place.parent
            if parent is None:
                self.roots = {key: root for key, root in self.roots.items() if root is not place}
            else:
                del parent.children[place.key]
            place = parent

    def stand_at(self, sequence: Sequence, block_count: int) -> None:
        """Say that a sequence's full blocks are places now, as many as `block_count`."""
        entered_count = sequence.window_entered_count
        place = sequence.window_place
        if place is None:
            root_key = sequence.keys.root_key
            place = self.roots.setdefault(root_key, WindowPlace(None, (b"", ())))
            entered_count = 0
        for at in range(entered_count, block_count):
            key = sequence.child_key(at, block_bytes=self._block_bytes)
            child = place.children.get(key)
            if child is None:
                child = place.children[key] = WindowPlace(place, key)
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

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """Forget every place; the blocks in the free order are the caller's."""
        for block in list(self.indexed()):
            block.place = None
            if not block.holder_count:
                self.pending.pop(block, None)
        for sequence in sequences:
            sequence.window_place = None
            sequence.window_entered_count = 0
        self.roots.clear()


def _subtree_blocks(place: WindowPlace) -> Iterator[WindowBlock]:
    waiting = [place]
    while waiting:
        place = waiting.pop()
        yield from place.blocks.values()
        waiting.extend(place.children.values())
