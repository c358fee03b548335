"""The invariants of a pool, as code."""

from collections import Counter

import numpy as np

from prefixd.controller.core import claim_invariants, window_invariants
from prefixd.controller.core.errors import require
from prefixd.controller.core.free_order import PlainRun
from prefixd.controller.core.node import Lane, Node
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.sequences import TOKEN_BYTES, Sequence
from prefixd.controller.core.state import PoolState


def check(pool: Pool) -> None:
    """Check every invariant of a pool. Raises InvariantBroken naming what broke.

    Reads the whole pool; cost grows with its blocks.
    """
    state = pool.state
    _check_accounts(state)
    holders = Counter[int]()
    written_slots = Counter[int]()
    path_holders = Counter[Lane]()
    for sequence in state.sequences.values():
        _check_sequence(state, sequence)
        table = sequence.table().tolist()
        holders.update(table)
        holders.update(window_invariants.held_block_ids(state, sequence))
        borrowed = sequence.borrowed
        written_slots.update(sequence.private_block_ids[0 if borrowed is None else 1 :])
        if borrowed is not None:
            path_holders[borrowed] += 1
        for node, start in sequence.path():
            if start not in sequence.twins:
                path_holders[node.lane] += 1
    nodes = list(state.index.nodes())
    for node in nodes:
        _check_node(state, node)
        require(
            node.lane.holder_count == path_holders[node.lane],
            f"a lane counts {node.lane.holder_count} holders, tables say {path_holders[node.lane]}",
        )
    _check_blocks(state, nodes, holders)
    window_invariants.check(state)
    claim_invariants.check(state, nodes)
    shared = {block for block, count in written_slots.items() if count > 1}
    require(
        shared <= set(state.twins.table_counts),
        f"blocks {sorted(shared)} outside the index stand in several tables unaccounted for",
    )
    _check_free_order(state)
    _check_counts(state, nodes)
    _check_digests(pool, nodes)


def _check_accounts(state: PoolState) -> None:
    order = state.order
    plain_count = cached_count = 0
    for segment in order:
        if isinstance(segment, PlainRun):
            require(len(segment) > 0, "the free order has an empty run")
            plain_count += len(segment)
        else:
            require(len(segment.block_ids) > 0, "the free order has an empty lane")
            cached_count += len(segment.block_ids)
        require(not segment.withheld, "a run is withheld between two steps")
    require(plain_count == order.plain_count, "the count of free blocks is wrong")
    require(cached_count == order.cached_count, "the count of evictable blocks is wrong")
    require(order.withheld_count == 0, "blocks are withheld between two steps")


def _check_blocks(state: PoolState, nodes: list[Node], holders: Counter[int]) -> None:
    available = state.order.block_ids()
    every_block = sorted([*available, *holders])
    require(
        every_block == list(range(1, state.spec.block_count)),
        "free, evictable and held blocks are not exactly the blocks of the pool",
    )
    indexed = [block_id for node in nodes for block_id in node.lane.block_ids]
    require(len(indexed) == len(set(indexed)), "a block stands for two places")
    for block_id, count in state.twins.table_counts.items():
        require(count > 1, f"block {block_id} is counted in {count} table")
        require(
            holders[block_id] == count,
            f"block {block_id} is counted in {count} tables and stands in {holders[block_id]}",
        )
    for node in nodes:
        for block_id in node.lane.block_ids:
            require(
                holders[block_id] == node.lane.holder_count,
                f"block {block_id} has {node.lane.holder_count} holders and stands in"
                f" {holders[block_id]} tables",
            )


def _check_sequence(state: PoolState, sequence: Sequence) -> None:
    columns = state.columns
    row = sequence.row
    size = state.spec.block_size
    known, scheduled, written = (
        int(column[row]) for column in (columns.known, columns.scheduled, columns.written)
    )
    name = sequence.sequence_id
    require(written <= scheduled, f"{name} has more written than scheduled positions")
    require(scheduled <= sequence.block_count * size, f"{name} has a position without a block")
    require(
        sequence.uncacheable or sequence.indexed_count == min(known, scheduled) // size,
        f"{name} has full blocks that are not indexed, or the reverse",
    )
    require(
        len(sequence.full_tokens) == known // size * size * TOKEN_BYTES,
        f"{name} has lost tokens",
    )
    covered = 0
    for node, start in sequence.path():
        covered += node.block_count
        end = start + node.block_count
        block_bytes = state.index.block_bytes
        require(
            sequence.full_tokens[start * block_bytes : end * block_bytes] == node.tokens,
            f"{name} stands on a path with other tokens",
        )
        for offset in range(node.block_count):
            require(
                sequence.varied_keys(start + offset) == node.varied_keys.get(offset, ()),
                f"{name} stands on a path with other extra keys",
            )
    require(covered == sequence.indexed_count, f"{name} stands inside a node")
    require(
        set(sequence.twins) <= set(range(sequence.indexed_count)),
        f"{name} has twins beyond its path",
    )
    _check_tail(state, sequence)


def _check_tail(state: PoolState, sequence: Sequence) -> None:
    """No slot that a sequence may still write is in another table without its knowing."""
    columns = state.columns
    name = sequence.sequence_id
    lane = sequence.borrowed
    if lane is not None:
        require(
            lane.node.block_count == 1 and lane.block_ids == sequence.private_block_ids[:1],
            f"{name} borrows another block than the first behind its path",
        )
    position = min(int(columns.known[sequence.row]), int(columns.scheduled[sequence.row]))
    first_at = position // state.spec.block_size - sequence.indexed_count
    writable = sequence.private_block_ids[first_at:]
    shares = lane is not None or any(block_id in state.twins.table_counts for block_id in writable)
    require(
        not shares or bool(columns.shares_tail[sequence.row]),
        f"{name} may write into a shared block without knowing it",
    )
    require(
        all(block_id not in state.twins.table_counts for block_id in writable[1:]),
        f"{name} shares a block that none of its tokens stands in",
    )


def _check_node(state: PoolState, node: Node) -> None:
    lane = node.lane
    block_bytes = state.index.block_bytes
    require(node.block_count > 0, "a node is empty")
    require(len(node.tokens) == node.block_count * block_bytes, "a node's tokens do not fit")
    require(node.parent.children.get(node.key) is node, "a parent does not know its child")
    require(
        node.key == (bytes(node.tokens[:block_bytes]), node.varied_keys.get(0, ())),
        "a node is found by another key than its own",
    )
    require(lane.is_linked == (lane.holder_count == 0), "a lane is free and held, or neither")
    if isinstance(node.parent, Node):
        parent_lane = node.parent.lane
        require(
            lane.published_count == 0 or not parent_lane.pending,
            "a published block has an unwritten parent",
        )
    ends = [lane.published_count, *(run.end for run in lane.pending)]
    require(ends == sorted(set(ends)) and ends[-1] == node.block_count, "pending runs are wrong")
    steps = [run.step_id for run in lane.pending]
    require(steps == sorted(set(steps)), "pending runs are not in the order of their steps")
    require(all(step_id > state.log.settled_id for step_id in steps), "an executed run is pending")
    require(not lane.twins or node.block_count == 1, "a place with twins is not alone")
    for twin in lane.twins:
        require(
            twin.sequence.twins.get(twin.block_index) == twin.block_id,
            "a twin is unknown to its table",
        )
        require(
            not state.twins.is_written(twin) or (lane.holder_count > 0 and not lane.pending),
            "a written twin has not taken an idle or unwritten place",
        )


def _check_free_order(state: PoolState) -> None:
    """Descendants are handed out before their ancestors (S19)."""
    seen: set[Node] = set()
    for segment in state.order:
        if not isinstance(segment, Lane):
            continue
        node = segment.node
        seen.add(node)
        for child in node.children.values():
            require(
                child in seen or not child.lane.is_linked,
                "an idle parent would be evicted before its idle child",
            )
            require(
                child in seen or bool(segment.twins),
                "an idle parent has a held child",
            )


def _check_counts(state: PoolState, nodes: list[Node]) -> None:
    index = state.index
    require(
        index.published_count == sum(node.lane.published_count for node in nodes),
        "the count of published blocks is wrong",
    )
    require(
        index.pending_count == sum(node.lane.pending_count for node in nodes),
        "the count of pending blocks is wrong",
    )
    require(
        set(index.pending_lanes) == {node.lane for node in nodes if node.lane.pending},
        "the pending lanes are not the lanes with pending blocks",
    )
    require(
        set(state.twins.unsettled)
        == {
            node.lane
            for node in nodes
            if any(not state.twins.is_written(twin) for twin in node.lane.twins)
        },
        "the unsettled lanes are not the lanes with unwritten twins",
    )
    merging = state.spec.merge_duplicates
    require(
        not merging
        or all(
            node.lane in state.twins.unmerged
            for node in nodes
            if any(state.twins.is_written(twin) for twin in node.lane.twins)
        ),
        "a written twin is not going to be merged",
    )
    for root in index.roots.values():
        require(bool(root.children), "a root has no children")
    require(
        set(state.rows) == set(state.sequences) == set(state.handles.values()),
        "the maps of sequences disagree",
    )
    require(
        len({sequence.row for sequence in state.sequences.values()}) == len(state.sequences),
        "two sequences share a row",
    )


def _check_digests(pool: Pool, nodes: list[Node]) -> None:
    digests = pool.state.digests
    require(digests.unhashed.keys() <= set(nodes), "a node lacks digests that is not indexed")
    for node in nodes:
        hashed_count = len(node.digests) // digests.digest_size
        require(hashed_count >= node.lane.published_count, "a published block has no digest")
        require(
            (node in digests.unhashed) == (hashed_count < node.block_count),
            "a node with missing digests is not known as one, or the reverse",
        )
        if hashed_count == 0:
            continue
        parent = node.parent
        require(
            not isinstance(parent, Node) or parent not in digests.unhashed,
            "a node has digests behind a node that lacks some",
        )
        require(
            bytes(node.digests) == pool.digests.recompute(node, hashed_count),
            "a stored digest differs from its content's",
        )
    require(bool(np.all(pool.state.columns.written >= 0)), "a written count is negative")
