"""Taking named content out of the index on an operator's behalf (rules S13, S19).

Tables keep their blocks, and the free order its positions. A sequence that stands on dropped
content keeps what it has and publishes and matches nothing more: what it computes depends on
content that somebody wants gone.
"""

from array import array
from collections.abc import Iterator, Set
from dataclasses import dataclass

from prefixd.controller.core.node import Node, Root
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState
from prefixd.controller.core.window_blocks import PlaceKey, WindowBlock, WindowPlace, twins_of


@dataclass(frozen=True, slots=True)
class Dropped:
    """Blocks that left the index, and how many of them a table still has."""

    block_count: int
    held_block_count: int


def drop_named(state: PoolState, *, block_ids: Set[int], digests: Set[bytes]) -> Dropped:
    """Drop the places of blocks and of published digests, with everything behind them (S19).

    A block of a window group goes alone, one of any full-attention group with its place. A twin of
    an indexed block names its place too (S15); any other block outside the index names nothing.
    Reads the whole index.
    """
    further = _named_further(state, block_ids)
    named = [
        (node, offset)
        for node in state.index.nodes()
        if (offset := _first_named(state, node, block_ids, digests, further.get(node))) is not None
    ]
    dropped: dict[Node, None] = {}
    for node, offset in named:
        if node not in dropped:
            _split_off(state, node, offset)
            dropped.update(dict.fromkeys(_subtree(node)))
    windows = _windows_of(state, dropped, block_ids, digests)
    # Both walks give parents before children; a block is removed before its parent (S25).
    for node in reversed(dropped):
        _drop_node(state, node)
    dropped_block_ids = {
        block_id for node in dropped for block_id in (*node.lane.block_ids, *_twins(node))
    }
    equal_blocks = {*windows, *(twin for block in windows for twin in twins_of(block))}
    for block in reversed(windows):
        state.windows.forget(block)
    for sequence in state.sequences.values():
        _leave_dropped(sequence, dropped, dropped_block_ids)
        if any(
            block in equal_blocks
            for table in sequence.window_tables.values()
            for block in table.held()
        ):
            sequence.uncacheable = True
    held = [node.block_count for node in dropped if node.lane.holder_count]
    held += [1 for block in windows if block.holder_count]
    return Dropped(sum(node.block_count for node in dropped) + len(windows), sum(held))


def _windows_of(
    state: PoolState, dropped: dict[Node, None], block_ids: Set[int], digests: Set[bytes]
) -> dict[WindowBlock, None]:
    """Find the window blocks at dropped places, and the named ones, which go alone (S19)."""
    windows = state.windows
    named = [
        block
        for block in windows.index.indexed()
        if _is_named(block, block_ids)
        or (
            block.place is not None
            and windows.index.is_published(block)
            and block.place.digest in digests
        )
    ]
    below = [
        block
        for node in dropped
        if not isinstance(node.parent, Node) or node.parent not in dropped
        for block in windows.index.blocks_below(node.root.root_key, _places_to(state, node))
    ]
    behind = [
        other
        for block in named
        if block.group_index in windows.full_groups and block.place is not None
        for other in windows.index.blocks_behind(block.place, block.group_index)
    ]
    return dict.fromkeys((*named, *behind, *below))


def _named_further(state: PoolState, block_ids: Set[int]) -> dict[Node, set[int]]:
    """Find where the named blocks of the further full-attention groups stand in the first one."""
    found: dict[Node, set[int]] = {}
    for block in state.windows.index.indexed() if state.windows.full_groups else ():
        if block.group_index in state.windows.full_groups and _is_named(block, block_ids):
            assert block.place is not None
            for node, offset in _offsets_of(state, block.place):
                found.setdefault(node, set()).add(offset)
    return found


def _is_named(block: WindowBlock, block_ids: Set[int]) -> bool:
    """Tell whether an indexed block, or a twin of it, is named."""
    return not block_ids.isdisjoint(one.block_id for one in (block, *twins_of(block)))


def _offsets_of(state: PoolState, place: WindowPlace) -> Iterator[tuple[Node, int]]:
    """Find a place in the first group's index, if it is there."""
    path: list[PlaceKey] = []
    at: WindowPlace | None = place
    while at is not None and not at.is_root:
        path.append(at.key)
        at = at.parent
    parent: Root | Node | None = state.index.roots.get(place.root_key)
    while parent is not None and path:
        node = parent.children.get(path[-1])
        offset = 0
        while node is not None and offset < node.block_count:
            if path.pop() != _place_key(state, node, offset):
                return
            if not path:
                yield node, offset
                return
            offset += 1
        parent = node


def _place_key(state: PoolState, node: Node, offset: int) -> PlaceKey:
    block_bytes = state.index.block_bytes
    tokens = bytes(node.tokens[offset * block_bytes : (offset + 1) * block_bytes])
    return (tokens, node.varied_keys.get(offset, ()))


def _places_to(state: PoolState, node: Node) -> list[PlaceKey]:
    """Return the places from the root to a node's first one."""
    path: list[PlaceKey] = [node.key]
    parent = node.parent
    while isinstance(parent, Node):
        path += [_place_key(state, parent, at) for at in reversed(range(parent.block_count))]
        parent = parent.parent
    path.reverse()
    return path


def _first_named(
    state: PoolState,
    node: Node,
    block_ids: Set[int],
    digests: Set[bytes],
    further: Set[int] | None,
) -> int | None:
    """Return the first offset in a node that is named, in any full-attention group."""
    lane = node.lane
    if any(twin.block_id in block_ids for twin in lane.twins):
        return 0
    offsets = [at for at, block_id in enumerate(lane.block_ids) if block_id in block_ids]
    offsets += further or ()
    if digests:
        size = state.digests.digest_size
        starts = range(0, lane.published_count * size, size)
        offsets += [
            start // size
            for start in starts
            if bytes(node.digests[start : start + size]) in digests
        ]
    return min(offsets, default=None)


def _split_off(state: PoolState, node: Node, offset: int) -> None:
    """Let a node begin with its named block; the blocks before it stay in a node of their own."""
    if offset:
        state.index.split(node, offset)


def _twins(node: Node) -> Iterator[int]:
    return (twin.block_id for twin in node.lane.twins)


def _subtree(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def _drop_node(state: PoolState, node: Node) -> None:
    lane = node.lane
    index = state.index
    state.events.remove(node, start=0, end=lane.published_count)
    index.published_count -= lane.published_count
    index.pending_count -= lane.pending_count
    index.remove_node(node)
    state.twins.forget(lane)
    if lane.is_linked:
        state.order.become_plain(lane)
    elif lane.holder_count > 1:
        for block_id in lane.block_ids:
            state.twins.table_counts[block_id] = lane.holder_count


def _leave_dropped(
    sequence: Sequence, dropped: dict[Node, None], dropped_block_ids: Set[int]
) -> None:
    """Make the blocks of dropped places private blocks of a table."""
    if sequence.borrowed is not None and sequence.borrowed.node in dropped:
        sequence.borrowed = None
    if not dropped_block_ids.isdisjoint(sequence.private_block_ids):
        # A fork has the first tokens of a dropped block.
        sequence.uncacheable = True
    on_path = [(node, start) for node, start in sequence.path() if node in dropped]
    if not on_path:
        return
    top, start = on_path[-1]
    table = sequence.table()
    sequence.private_block_ids = array("q", table[start:].tolist())
    sequence.leaf = top.parent if isinstance(top.parent, Node) else None
    sequence.indexed_count = start
    sequence.twins = {at: block for at, block in sequence.twins.items() if at < start}
    sequence.uncacheable = True
