"""The block index: a radix tree whose nodes are runs of blocks.

A place is found by exact token and extra-key equality (S3); cost is per node, not per block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from prefixd.controller.core import node as nodes
from prefixd.controller.core.claims import Claims
from prefixd.controller.core.digests import DigestWork
from prefixd.controller.core.events import EventLog
from prefixd.controller.core.free_order import FreeOrder
from prefixd.controller.core.identity import RootKey, SequenceKeys
from prefixd.controller.core.match import Match, PartialMatch
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.node import Lane, Node, PendingRun, Root
from prefixd.controller.core.sequences import TOKEN_BYTES, Sequence
from prefixd.controller.core.step_log import EXECUTED

WrittenRun = tuple[StepId, int]
"""Blocks up to an end index that one step writes; EXECUTED where they are written already."""


class PrefixIndex:
    """Which block holds which prefix.

    Invariants: a published block's parent is published; `published_count` and `pending_count` count
    the blocks of all lanes; `pending_lanes` has exactly the lanes with unwritten blocks; no root is
    without children. Whatever changes the published set says so in `events`: a parent is stored
    before its children and removed behind them (S25).
    """

    def __init__(
        self,
        order: FreeOrder,
        claims: Claims,
        digests: DigestWork,
        events: EventLog,
        *,
        block_size: int,
    ) -> None:
        self.roots: dict[RootKey, Root] = {}
        self.published_count = 0
        self.pending_count = 0
        self.pending_lanes: dict[Lane, None] = {}
        self.block_bytes = block_size * TOKEN_BYTES
        self.digest_size = digests.digest_size
        self._order = order
        self._claims = claims
        self._digests = digests
        self._events = events

    # Matching.

    def match(
        self,
        keys: SequenceKeys,
        packed_tokens: bytes,
        *,
        end_block: int,
        start_block: int = 0,
        leaf: Node | None = None,
    ) -> Match:
        """Find the longest run of blocks in [start_block, end_block); changes nothing (S8).

        `leaf` is the end of the path that already covers `start_block` blocks.
        """
        match = Match(start_block)
        parent = self.roots.get(keys.root_key) if leaf is None else leaf
        at = start_block
        while parent is not None and at < end_block:
            begin = at * self.block_bytes
            first_tokens = packed_tokens[begin : begin + self.block_bytes]
            node = parent.children.get((first_tokens, keys.varied_keys.get(at, ())))
            if node is None:
                break
            count = self.common_block_count(node, keys, packed_tokens, at=at, end_block=end_block)
            lane = node.lane
            if match.published_count == at - start_block:
                match.published_count += min(count, lane.published_count)
            if lane.is_linked and not lane.withheld:
                match.idle_count += count
            match.path.append(node)
            match.last_count = count
            at += count
            parent = node if count == node.block_count else None
        match.block_count = at - start_block
        return match

    def common_block_count(
        self,
        node: Node,
        keys: SequenceKeys,
        packed_tokens: bytes | bytearray,
        *,
        at: int,
        end_block: int,
    ) -> int:
        """Count the leading blocks of a node that equal those from block `at` on."""
        begin = at * self.block_bytes
        count = min(node.block_count, end_block - at)
        ours_packed = memoryview(packed_tokens)[begin : begin + count * self.block_bytes]
        if not node.tokens.startswith(ours_packed):
            ours = np.frombuffer(ours_packed, dtype=np.uint32)
            theirs = np.frombuffer(bytes(node.tokens[: len(ours_packed)]), dtype=np.uint32)
            different = np.flatnonzero(ours != theirs)
            if len(different):
                count = int(different[0]) * TOKEN_BYTES // self.block_bytes
        if keys.varied_keys or node.varied_keys:
            for offset in range(count):
                ours_keys = keys.varied_keys.get(at + offset, ())
                if node.varied_keys.get(offset, ()) != ours_keys:
                    return offset
        return count

    # Holding.

    def hold(self, sequence: Sequence, match: Match) -> None:
        """Put matched blocks into a sequence's table; idle ones leave the free order (S12)."""
        if not match.path:
            return
        last = match.path[-1]
        if match.last_count < last.block_count:
            match.path[-1] = self.split(last, match.last_count)
        for node in match.path:
            lane = node.lane
            if lane.is_linked:
                self._order.remove(lane)
            lane.holder_count += 1
        self._claims.use(node.lane for node in match.path)
        sequence.leaf = match.path[-1]
        sequence.indexed_count += match.block_count

    def hold_path(self, child: Sequence, parent: Sequence, *, block_count: int) -> None:
        """Put the first blocks of a parent's path into its fork's table.

        The holder counts rise, own twins aside: those are not the lane's blocks.
        """
        for node, start in list(parent.path()):
            if start >= block_count:
                continue
            held = node
            if start + node.block_count > block_count:
                held = self.split(node, block_count - start)
            if child.leaf is None:
                child.leaf = held
            if start not in parent.twins:
                held.lane.holder_count += 1
        child.indexed_count = block_count

    def lend(self, lender: Sequence, block_index: int) -> Lane:
        """Count one more holder of a block on a sequence's path; returns the block's own lane."""
        node, start = next(step for step in lender.path() if step[1] <= block_index)
        if start < block_index:
            self.split(node, block_index - start)
        if node.block_count > 1:
            node = self.split(node, 1)
        node.lane.holder_count += 1
        return node.lane

    def isolate(self, partial: PartialMatch) -> Lane:
        """Give a partially matched block a lane of its own, once the match before it is held."""
        # Holding split the last matched node, so the block is its node's first one now.
        node = partial.node
        return (self.split(node, 1) if node.block_count > 1 else node).lane

    def split(self, node: Node, block_count: int) -> Node:
        """Split a node behind its first blocks; returns the new upper node."""
        upper = nodes.split(
            node, block_count, block_bytes=self.block_bytes, digest_size=self.digest_size
        )
        if node.lane.is_linked:
            self._order.insert_after(upper.lane, place=node.lane)
        if upper.lane.pending:
            self.pending_lanes[upper.lane] = None
        if not node.lane.pending:
            self.pending_lanes.pop(node.lane, None)
        self._digests.note(upper)
        self._digests.note(node)
        return upper

    def merge_only_child(self, node: Node) -> None:
        """Merge a node with its only child where both were released in the same walk.

        This bounds fragmentation: a branch that is gone leaves no seam behind.
        """
        if len(node.children) != 1:
            return
        (child,) = node.children.values()
        lane = node.lane
        if not nodes.may_merge(node, child):
            return
        self._order.absorb(lane, absorbed=child.lane)
        nodes.merge_child(node, child, digest_size=self.digest_size)
        if self.pending_lanes.pop(child.lane, lane) is None:
            self.pending_lanes[lane] = None
        self._digests.forget(child)
        self._digests.note(node)

    # Changing the set of places.

    def children_of(self, sequence: Sequence) -> Root | Node:
        """Return whose children the next place of a sequence's path is among."""
        if sequence.leaf is not None:
            return sequence.leaf
        root_key = sequence.keys.root_key
        return self.roots.setdefault(root_key, Root(root_key))

    def add_node(
        self, sequence: Sequence, block_ids: array[int], runs: Iterable[WrittenRun]
    ) -> None:
        """Add a node with a sequence's blocks behind its path, held by the sequence."""
        start = sequence.indexed_count
        parent = self.children_of(sequence)
        key = sequence.child_key(start, block_bytes=self.block_bytes)
        if parent.children and isinstance(parent, Node):
            self._claims.part(parent)
        node = Node(parent, key=key, tokens=bytearray(), varied_keys={}, block_ids=array("q"))
        parent.children[key] = node
        node.lane.holder_count = 1
        sequence.leaf = node
        self.extend_leaf(sequence, block_ids, runs)

    def extend_leaf(
        self, sequence: Sequence, block_ids: array[int], runs: Iterable[WrittenRun]
    ) -> None:
        """Append a sequence's next full blocks to its leaf, which only it holds.

        `runs` say which step writes the blocks; their ends are table indices, and runs that end at
        or before the first appended block are left out.
        """
        node = sequence.leaf
        assert node is not None
        start = sequence.indexed_count
        end = start + len(block_ids)
        base = start - node.block_count
        node.tokens += sequence.full_tokens[start * self.block_bytes : end * self.block_bytes]
        if sequence.keys.varied_keys:
            for at in range(start, end):
                keys = sequence.varied_keys(at)
                if keys:
                    node.varied_keys[at - base] = keys
        node.lane.block_ids.extend(block_ids)
        sequence.indexed_count = end
        self._digests.note(node)
        for step_id, run_end in runs:
            if run_end > start:
                self._write_later(node.lane, step_id, run_end - base)

    def append_block(self, sequence: Sequence, leaf: Node, step_id: StepId) -> None:
        """Append a sequence's next block to its leaf, as `extend_leaf` would; the step writes it
        and it has no extra keys of its own."""
        lane = leaf.lane
        lane.block_ids.append(sequence.private_block_ids.pop(0))
        start = sequence.indexed_count * self.block_bytes
        leaf.tokens += sequence.full_tokens[start : start + self.block_bytes]
        sequence.indexed_count += 1
        self._digests.note(leaf)
        self.pending_count += 1
        end = len(lane.block_ids)
        if lane.pending and lane.pending[-1].step_id == step_id:
            lane.pending[-1].end = end
        else:
            lane.pending.append(PendingRun(step_id, end))
            self.pending_lanes[lane] = None

    def _write_later(self, lane: Lane, step_id: StepId, end: int) -> None:
        covered = lane.pending[-1].end if lane.pending else lane.published_count
        if step_id == EXECUTED:
            assert not lane.pending
            self._publish_up_to(lane, end)
            self.published_count += end - covered
            return
        self.pending_count += end - covered
        if lane.pending and lane.pending[-1].step_id == step_id:
            lane.pending[-1].end = end
        else:
            assert not lane.pending or lane.pending[-1].step_id < step_id
            lane.pending.append(PendingRun(step_id, end))
        self.pending_lanes[lane] = None

    def write_no_earlier(self, node: Node, step_id: StepId) -> None:
        """Let the places behind a node be written by no step before this one, as the node is."""
        behind = list(node.children.values())
        while behind:
            child = behind.pop()
            runs = child.lane.pending
            early_count = sum(run.step_id < step_id for run in runs)
            if early_count == 0:
                continue
            end = runs[early_count - 1].end
            later = runs[early_count:]
            if not later:
                behind.extend(child.children.values())
            if not later or later[0].step_id > step_id:
                later.insert(0, PendingRun(step_id, end))
            child.lane.pending = later

    def publish(self, step_id: StepId) -> None:
        """Publish every block that an executed step wrote, parents before children: what stands
        behind one that a twin alone has written waits until that has the place."""
        for lane in list(self.pending_lanes):
            due = [lane]
            while (above := nodes.pending_parent(due[-1])) is not None:
                due.append(above)
            while due:
                if not self._publish_written(due.pop(), step_id):
                    break

    def _publish_written(self, lane: Lane, step_id: StepId) -> bool:
        published_count = lane.published_count
        end = published_count
        while lane.pending and lane.pending[0].step_id <= step_id:
            end = lane.pending.pop(0).end
        if end > published_count:
            self._publish_up_to(lane, end)
            self.published_count += end - published_count
            self.pending_count -= end - published_count
        if not lane.pending:
            self.pending_lanes.pop(lane, None)
        return not lane.pending

    def _publish_up_to(self, lane: Lane, end: int) -> None:
        start = lane.published_count
        lane.published_count = end
        self._events.store(lane.node, start=start, end=end)

    def publish_whole(self, lane: Lane) -> None:
        """Publish a pending one-block lane whose place a written twin has taken."""
        assert lane.published_count == 0
        lane.pending = []
        self._publish_up_to(lane, lane.node.block_count)
        self.published_count += lane.published_count
        self.pending_count -= lane.published_count
        del self.pending_lanes[lane]

    def write_again(self, lane: Lane, step_id: StepId) -> None:
        """Say that a one-block lane has another block now, which a step will write."""
        if lane.published_count:
            self.published_count -= 1
            self.pending_count += 1
            self._events.remove(lane.node, start=0, end=1)
        lane.published_count = 0
        lane.pending = [PendingRun(step_id, 1)]
        self.pending_lanes[lane] = None

    def evict_tail(self, lane: Lane, block_count: int) -> list[int]:
        """Drop the last blocks of an idle lane (S13) and return them, tail first."""
        node = lane.node
        assert not node.children, "the deepest block goes first (S19)"
        assert lane.holder_count == 0
        kept_count = node.block_count - block_count
        taken = list(reversed(lane.block_ids[kept_count:]))
        lost_count = max(0, lane.published_count - kept_count)
        self.published_count -= lost_count
        self.pending_count -= block_count - lost_count
        if lost_count:
            self._events.remove(node, start=kept_count, end=lane.published_count)
        if kept_count == 0:
            self.remove_node(node)
            return taken
        nodes.truncate(node, kept_count, block_bytes=self.block_bytes, digest_size=self.digest_size)
        if not lane.pending:
            self.pending_lanes.pop(lane, None)
        self._digests.note(node)
        return taken

    def remove_node(self, node: Node) -> None:
        """Take a node out of the tree; the counts are the caller's."""
        parent = node.parent
        del parent.children[node.key]
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.root_key]
        self.pending_lanes.pop(node.lane, None)
        self._digests.forget(node)
        self._claims.leave(node)

    def clear(self) -> None:
        """Forget every place; the lanes are the caller's."""
        self.roots.clear()
        self.pending_lanes.clear()
        self._digests.unhashed.clear()
        self._claims.clear()
        self.published_count = 0
        self.pending_count = 0

    def nodes(self) -> Iterable[Node]:
        """Walk all nodes, parents before children."""
        waiting: list[Node] = []
        for root in self.roots.values():
            waiting.extend(root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
