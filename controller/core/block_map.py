"""What every block of a pool is at one moment: the whole index, read in bulk for listings."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefixd.controller.core.messages import IntArray
from prefixd.controller.core.node import Node, Root
from prefixd.controller.core.pool import Pool
from prefixd.controller.core.window_blocks import WindowBlock


@dataclass(frozen=True, slots=True)
class BlockMap:
    """What every block of a pool is, by block id; entry 0 is the null block.

    `node_at[b]` is 1 + the index in `nodes` of the node that block b stands in, 0 where it is not
    in the index; `offset[b]` its offset there; `holder_count[b]` the tables that have it.
    `windows` has the window groups' blocks that are held or in the index.
    """

    nodes: tuple[Node, ...]
    node_at: IntArray
    offset: IntArray
    holder_count: IntArray
    windows: Mapping[int, WindowBlock]


def block_map(pool: Pool) -> BlockMap:
    """Read the whole index and what the tables have beside it.

    The time is a fraction of a microsecond per node; blocks are read in bulk.
    """
    state = pool.state
    block_count = state.spec.block_count
    nodes = tuple(state.index.nodes())
    lanes = [node.lane for node in nodes]
    block_ids = np.frombuffer(b"".join(lane.block_ids for lane in lanes), dtype=np.int64)
    lengths = np.array([len(lane.block_ids) for lane in lanes], dtype=np.int64)
    holder_counts = np.array([lane.holder_count for lane in lanes], dtype=np.int64)
    node_at = np.zeros(block_count, dtype=np.int64)
    offset = np.zeros(block_count, dtype=np.int64)
    holder_count = np.zeros(block_count, dtype=np.int64)
    node_at[block_ids] = np.repeat(np.arange(1, len(nodes) + 1), lengths)
    offset[block_ids] = np.arange(len(block_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    holder_count[block_ids] = np.repeat(holder_counts, lengths)
    own: list[int] = []
    for sequence in state.sequences.values():
        own.extend(sequence.twins.values())
        own.extend(sequence.private_block_ids[0 if sequence.borrowed is None else 1 :])
    holder_count += np.bincount(np.array(own, dtype=np.int64), minlength=block_count)
    windows = _window_blocks(pool)
    for block_id, block in windows.items():
        holder_count[block_id] = block.holder_count
    return BlockMap(
        nodes=nodes,
        node_at=node_at,
        offset=offset,
        holder_count=holder_count,
        windows=windows,
    )


def _window_blocks(pool: Pool) -> dict[int, WindowBlock]:
    state = pool.state
    blocks = {block.block_id: block for block in state.windows.index.indexed()}
    for sequence in state.sequences.values():
        for table in sequence.window_tables.values():
            blocks.update((block.block_id, block) for block in table.held())
    return {int(block_id): block for block_id, block in blocks.items()}


def start_block(node: Node, starts: dict[Node, int]) -> int:
    """Return how many blocks stand before a node; `starts` remembers what is known already."""
    path: list[Node] = []
    at: Node | Root = node
    while isinstance(at, Node) and at not in starts:
        path.append(at)
        at = at.parent
    start = starts[at] + at.block_count if isinstance(at, Node) else 0
    for below in reversed(path):
        starts[below] = start
        start += below.block_count
    return starts[node]
