"""The invariants of a pool's window groups, as code."""

from collections import Counter

from prefixd.controller.core.errors import require
from prefixd.controller.core.sequences import Sequence
from prefixd.controller.core.state import PoolState
from prefixd.controller.core.window_blocks import WindowBlock, WindowPlace


def held_block_ids(state: PoolState, sequence: Sequence) -> list[int]:
    """Return the blocks of a sequence's window tables, after checking these.

    Raises InvariantBroken.
    """
    name = sequence.sequence_id
    require(
        list(sequence.window_tables) == list(state.windows.sizes),
        f"{name} has not a table for each window group",
    )
    block_ids: list[int] = []
    for group_index, table in sequence.window_tables.items():
        require(
            len(table.blocks) == sequence.block_count,
            f"{name} has window tables of another length than its block table",
        )
        require(not any(table.blocks[: table.first]), f"{name} holds a block that it has passed")
        require(
            all(block.group_index == group_index for block in table.held()),
            f"{name} has another group's block in a window table",
        )
        block_ids += [block.block_id for block in table.held()]
    # A rollback may lead back to the known count.
    columns = state.columns
    position = min(int(columns.known[sequence.row]), int(columns.scheduled[sequence.row]))
    require(
        state.windows.has_window(sequence, token_count=position),
        f"{name} lacks a block of its next query's window",
    )
    if state.windows.count and not sequence.uncacheable:
        require(
            sequence.window_entered_count == sequence.indexed_count,
            f"{name} has entered another length in the window groups",
        )
    return block_ids


def check(state: PoolState) -> None:
    """Check the window groups' index, holders and pending blocks. Raises InvariantBroken."""
    windows = state.windows
    holders = Counter[WindowBlock]()
    standing = Counter[WindowPlace]()
    for sequence in state.sequences.values():
        for table in sequence.window_tables.values():
            holders.update(table.held())
        if sequence.window_place is not None:
            standing[sequence.window_place] += 1
    indexed = list(windows.index.indexed())
    idle = [segment for segment in state.order if isinstance(segment, WindowBlock)]
    require(set(idle) <= set(indexed), "an idle window block is in no place")
    for block in [*indexed, *holders]:
        require(block.holder_count == holders[block], "a window block counts other holders")
        require(block.is_linked == (block.holder_count == 0), "a window block is free and held")
    require(
        all(block.step_id > state.log.settled_id for block in windows.index.pending),
        "an executed window block is pending",
    )
    require(
        set(windows.index.pending) <= {*indexed, *holders}, "a window block is pending that is gone"
    )
    _check_published(state, indexed)
    for place in windows.index.all_places():
        _check_twins(state, place)
        _check_parent(state, place)
    for root in windows.index.roots.values():
        _check_places(root, standing)
    require(not +standing, "a sequence stands on a place outside the index")


def _check_published(state: PoolState, indexed: list[WindowBlock]) -> None:
    index = state.windows.index
    published = [block for block in indexed if index.is_published(block)]
    require(
        index.published_count == len(published), "the count of published window blocks is wrong"
    )
    for block in published:
        require(
            block.place is not None and bool(block.place.digest),
            "a published window block has no digest",
        )
    unhashed: set[WindowPlace] = set()
    for place in index.all_places():
        if not place.digest:
            unhashed.add(place)
            continue
        require(place.parent not in unhashed, "a place has a digest behind one that has none")
        require(
            place.digest == index.digests.recompute(place),
            "a place has another digest than its content's",
        )
    require(unhashed == set(index.digests.unhashed), "a place without a digest is not known as one")


def _check_parent(state: PoolState, place: WindowPlace) -> None:
    """A cached block of full attention can be reached by those before it (S19)."""
    parent = place.parent
    for group_index in state.windows.full_groups:
        require(
            parent is None
            or parent.is_root
            or group_index not in place.blocks
            or group_index in parent.blocks,
            "a block of a full-attention group is cached behind one that is not",
        )


def _check_twins(state: PoolState, place: WindowPlace) -> None:
    index, at = state.windows.index, place.depth - 1
    for twin in place.twins:
        indexed = place.blocks.get(twin.group_index)
        require(
            twin.twin_of is place and twin.place is None and indexed is not None,
            "a twin of no window block stands at a place",
        )
        require(
            any(
                sequence.window_entered_count > at
                and sequence.window_tables[twin.group_index].blocks[at] is twin
                for sequence in state.sequences.values()
            ),
            "no table has a twin as a full block",
        )
        if index.is_pending(twin):
            continue
        require(
            indexed is not None and indexed.holder_count > 0 and not index.is_pending(indexed),
            "a written twin has not taken an idle or unwritten window place",
        )
        require(
            not state.spec.merge_duplicates or twin in state.windows.twins.unmerged,
            "a written twin of a window block is not going to be merged",
        )


def _check_places(root: WindowPlace, standing: Counter[WindowPlace]) -> None:
    waiting = [root]
    while waiting:
        place = waiting.pop()
        require(place.is_needed, "a place is kept that nothing needs")
        require(place.sequence_count == standing.pop(place, 0), "a place counts other sequences")
        for group_index, block in place.blocks.items():
            require(
                block.place is place and block.group_index == group_index,
                "a window block stands at another place than it says",
            )
        for key, child in place.children.items():
            require(child.parent is place and child.key == key, "a place does not know its parent")
            waiting.append(child)
