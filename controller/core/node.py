"""Nodes of the block index: runs of consecutive blocks with equal holders.

A node stands for a run of places: the tokens and extra keys of its blocks behind those of all its
ancestors. A lane holds the blocks of the first KV group at these places; those of further groups
stand in an index of their own (window_index.py).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prefixd.controller.core.free_order import CachedRun
from prefixd.controller.core.hashing import ExtraKeys
from prefixd.controller.core.identity import RootKey
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.run_claims import RunClaims

if TYPE_CHECKING:
    from prefixd.controller.core.sequences import Sequence

ChildKey = tuple[bytes, ExtraKeys]
"""Packed tokens and varied extra keys of a node's first block."""
_Run = TypeVar("_Run", bytearray, "array[int]")


@dataclass(frozen=True, slots=True)
class Twin:
    """A block equal to an indexed one that stands in a sequence's table (S15).

    Forks that share the block have a twin each. `serial` ascends with the time at which the block
    became a twin.
    """

    sequence: Sequence
    block_id: int
    block_index: int
    serial: int


@dataclass(slots=True)
class PendingRun:
    """Blocks of a lane up to `end` (from the end of the run before) that `step_id` writes."""

    step_id: StepId
    end: int


class Lane(CachedRun):
    """One KV group's blocks of a node.

    Invariants: blocks [0, published_count) are written, the `pending` runs cover the others in
    ascending order of steps; the lane is linked in the free order exactly while `holder_count` is
    0; `holder_count` counts the tables that have these very blocks, twins are counted apart; a
    lane with twins is one block long, and none of its twins is written while it is linked or
    unwritten. `read_step_id` is the last step that a reader of it was planned and closed in.
    """

    __slots__ = (
        "holder_count",
        "last_use_ms",
        "node",
        "pending",
        "published_count",
        "read_step_id",
        "twins",
    )

    def __init__(self, node: Node, block_ids: array[int]) -> None:
        super().__init__(block_ids)
        self.node = node
        self.holder_count = 0
        self.published_count = 0
        self.pending: list[PendingRun] = []
        self.twins: list[Twin] = []
        self.last_use_ms = 0
        self.read_step_id = StepId(0)

    @property
    def pending_count(self) -> int:
        """Blocks that are not written yet."""
        return len(self.block_ids) - self.published_count


class Node:
    """A run of places in the index.

    `tokens` are packed, four little-endian bytes each; `varied_keys` maps offsets in the run to the
    extra keys that differ from block to block; `digests` are the packed digests of the leading
    blocks whose digest is computed.
    """

    __slots__ = ("children", "digests", "key", "lane", "parent", "root", "tokens", "varied_keys")

    def __init__(
        self,
        parent: Node | Root,
        *,
        key: ChildKey,
        tokens: bytearray,
        varied_keys: dict[int, ExtraKeys],
        block_ids: array[int],
    ) -> None:
        self.parent = parent
        self.root: Root = parent if isinstance(parent, Root) else parent.root
        self.key = key
        self.tokens = tokens
        self.varied_keys = varied_keys
        self.children: dict[ChildKey, Node] = {}
        self.digests = bytearray()
        self.lane = Lane(self, block_ids)

    @property
    def block_count(self) -> int:
        """Length of the run in blocks."""
        return len(self.lane.block_ids)


class Root:
    """Where the sequences with one set of whole-sequence extra keys begin."""

    __slots__ = ("children", "root_key")

    def __init__(self, root_key: RootKey) -> None:
        self.root_key = root_key
        self.children: dict[ChildKey, Node] = {}


def split(node: Node, block_count: int, *, block_bytes: int, digest_size: int) -> Node:
    """Split a node behind its first blocks and return the new upper node.

    The node itself keeps the lower part, so whoever points at it as a leaf stays right. The caller
    links the upper lane where the lower one is linked.
    """
    lane = node.lane
    assert 0 < block_count < node.block_count
    assert not lane.twins
    upper = Node(
        node.parent,
        key=node.key,
        tokens=node.tokens,
        varied_keys={at: keys for at, keys in node.varied_keys.items() if at < block_count},
        block_ids=lane.block_ids,
    )
    upper.digests = node.digests
    # Prompts mostly part from a cached one near its end: it is the lower part that is copied.
    node.tokens = _cut_off(upper.tokens, block_count * block_bytes)
    node.digests = _cut_off(upper.digests, block_count * digest_size)
    lane.block_ids = _cut_off(upper.lane.block_ids, block_count)
    node.parent.children[node.key] = upper
    node.parent = upper
    node.varied_keys = {
        at - block_count: keys for at, keys in node.varied_keys.items() if at >= block_count
    }
    node.key = (bytes(node.tokens[:block_bytes]), node.varied_keys.get(0, ()))
    upper.children[node.key] = node
    _split_lane(lane, upper.lane, block_count)
    return upper


def _cut_off(run: _Run, start: int) -> _Run:
    """Take what stands from `start` on out of a run and return it."""
    end = run[start:]
    del run[start:]
    return end


def _split_lane(lower: Lane, upper: Lane, block_count: int) -> None:
    upper.holder_count = lower.holder_count
    upper.last_use_ms = lower.last_use_ms
    upper.read_step_id = lower.read_step_id
    upper.pending = _clipped_runs(lower, block_count)
    behind = [run for run in lower.pending if run.end > block_count]
    lower.pending = [PendingRun(run.step_id, run.end - block_count) for run in behind]
    upper.published_count = min(lower.published_count, block_count)
    lower.published_count -= upper.published_count
    upper.band = lower.band
    if lower.claims is not None:
        upper.claims = RunClaims()
        upper.claims.band = lower.claims.band
        upper.claims.recount(None, lower.claims.band)


def _clipped_runs(lane: Lane, block_count: int) -> list[PendingRun]:
    clipped: list[PendingRun] = []
    start = lane.published_count
    for run in lane.pending:
        if start < block_count:
            clipped.append(PendingRun(run.step_id, min(run.end, block_count)))
        start = run.end
    return clipped


def may_merge(node: Node, child: Node) -> bool:
    """Tell whether a node and its only child were released in the same walk, so that nothing
    marks their border."""
    lane = node.lane
    return (
        child.lane.following is lane
        and child.lane.last_use_ms == lane.last_use_ms
        and child.lane.withheld == lane.withheld
        and child.lane.read_step_id == lane.read_step_id
        and (lane.claims is None or not lane.claims.marks_end)
        and not lane.pending
        and not lane.twins
        and not child.lane.twins
    )


def merge_child(node: Node, child: Node, *, digest_size: int) -> None:
    """Append the only child of a published node to it; both are idle and without twins."""
    lane = node.lane
    offset = node.block_count
    assert lane.published_count == offset
    if len(node.digests) == offset * digest_size:
        node.digests += child.digests
    node.tokens += child.tokens
    for at, keys in child.varied_keys.items():
        node.varied_keys[at + offset] = keys
    lane.block_ids.extend(child.lane.block_ids)
    lane.published_count += child.lane.published_count
    lane.pending = [PendingRun(run.step_id, run.end + offset) for run in child.lane.pending]
    lane.claims = child.lane.claims
    if lane.claims is not None and lane.claims.claim is not None:
        lane.claims.claim.run = lane
    node.children = child.children
    for grandchild in node.children.values():
        grandchild.parent = node


def truncate(node: Node, block_count: int, *, block_bytes: int, digest_size: int) -> None:
    """Drop the last blocks of a node, so that `block_count` are left."""
    lane = node.lane
    del lane.block_ids[block_count:]
    del node.tokens[block_count * block_bytes :]
    del node.digests[block_count * digest_size :]
    if node.varied_keys:
        node.varied_keys = {at: keys for at, keys in node.varied_keys.items() if at < block_count}
    lane.pending = _clipped_runs(lane, block_count)
    lane.published_count = min(lane.published_count, block_count)


def pending_parent(lane: Lane) -> Lane | None:
    """Return the lane that a lane's places stand on, where blocks of it are unwritten."""
    parent = lane.node.parent
    return parent.lane if isinstance(parent, Node) and parent.lane.pending else None
