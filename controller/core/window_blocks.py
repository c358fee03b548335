"""Blocks of sliding-window groups: one object each, and their places by content (rule S23).

Window blocks come and go singly, so they are kept beside the runs of the full-attention index: a
trie with one place per block, in which each window group has at most one block per place.
"""

from __future__ import annotations

from array import array

from prefixd.controller.core.free_order import CachedRun
from prefixd.controller.core.hashing import ExtraKeys
from prefixd.controller.core.identity import RootKey
from prefixd.controller.core.messages import BlockId, StepId

PlaceKey = tuple[bytes, ExtraKeys]
"""Packed tokens and varied extra keys of one block."""


class WindowPlace:
    """One place: a block's tokens behind those of its parents.

    `blocks` maps a group to its block here; `twins` are equal blocks outside the index, of all
    groups, in the order in which they came; `sequence_count` counts the sequences that end here.
    `depth` counts the places from the root to here, 0 for the root, which is no block's.
    `digest` is empty until it is computed; the root, which is no block's place, never has one.
    """

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "digest",
        "key",
        "parent",
        "root_key",
        "sequence_count",
        "twins",
    )

    def __init__(self, parent: WindowPlace | None, key: PlaceKey, root_key: RootKey) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.key = key
        self.root_key = root_key
        self.children: dict[PlaceKey, WindowPlace] = {}
        self.blocks: dict[int, WindowBlock] = {}
        self.twins: list[WindowBlock] = []
        self.sequence_count = 0
        self.digest = b""

    @property
    def is_root(self) -> bool:
        """Whether sequences begin here."""
        return self.parent is None

    @property
    def tokens(self) -> bytes:
        """Packed tokens of the block."""
        return self.key[0]

    @property
    def varied_keys(self) -> ExtraKeys:
        """The extra keys that only this block has."""
        return self.key[1]

    @property
    def is_needed(self) -> bool:
        """Whether a block, a deeper place or a sequence stands on this place."""
        return bool(self.blocks or self.twins or self.children or self.sequence_count)


class WindowBlock(CachedRun):
    """A block of a window group that is held or cached.

    Invariants: it stands in `holder_count` tables; it is linked in the free order exactly while
    that is 0. `place` is where the index has it, None while it has it nowhere; `twin_of` the place
    of an indexed block that it is a twin of (S15). `step_id` is the step that writes it, once it is
    full; `read_step_id` the last step that a reader of it was
    planned and left it in; `source_step_id` the last step that copies from it.
    """

    __slots__ = (
        "group_index",
        "holder_count",
        "last_use_ms",
        "place",
        "read_step_id",
        "source_step_id",
        "step_id",
        "twin_of",
    )

    def __init__(self, block_id: int, *, group_index: int) -> None:
        super().__init__(array("q", (block_id,)))
        self.group_index = group_index
        self.holder_count = 1
        self.last_use_ms = 0
        self.place: WindowPlace | None = None
        self.twin_of: WindowPlace | None = None
        self.step_id = StepId(0)
        self.read_step_id = StepId(0)
        self.source_step_id = StepId(0)

    def is_used_by(self, step_id: StepId) -> bool:
        """Tell whether a step reads or copies the block for somebody who has left it (S22)."""
        return step_id in (self.read_step_id, self.source_step_id)

    @property
    def block_id(self) -> BlockId:
        """The block."""
        return BlockId(self.block_ids[0])


class WindowTable:
    """A sequence's table in one window group; a place that it need not hold has None.

    Invariant: no block stands before `first`.
    """

    __slots__ = ("blocks", "first")

    def __init__(self) -> None:
        self.blocks: list[WindowBlock | None] = []
        self.first = 0

    def block_ids(self) -> list[int]:
        """Return the table with block 0 at the places that it does not hold."""
        return [0 if block is None else block.block_id for block in self.blocks]

    def held(self) -> list[WindowBlock]:
        """Return the blocks that the table holds, in order."""
        return [block for block in self.blocks[self.first :] if block is not None]


def first_needed(position: int, *, window_token_count: int, block_size: int) -> int:
    """Return the first block that a query at `position` attends to: it sees the tokens in
    (position - window, position]."""
    return max(0, position - window_token_count + 1) // block_size


def twins_of(block: WindowBlock) -> list[WindowBlock]:
    """List the twins of an indexed block, in the order in which they came."""
    place = block.place
    if place is None:
        return []
    return [twin for twin in place.twins if twin.group_index == block.group_index]
