"""Which layers of a model share one block table."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

GROUPS_PER_POOL_MAX = 64
"""Most KV groups of a pool."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table.

    Layer ``layer_indices[i]`` of any group keeps its KV in the pool's page memory ``i``, so a block
    id names one page whichever group owns it.

    Attributes:
        window_token_count: a query at q reads keys in (q - window, q]; None: all up to q.
        layer_indices: in the order in which a forward visits them.
    """

    window_token_count: int | None = None
    layer_indices: tuple[int, ...] = ()

    def first_read_block(self, position: int, *, block_size: int) -> int:
        """Index in a block table of the first block that a query at ``position`` reads."""
        if self.window_token_count is None:
            return 0
        return max(0, position - self.window_token_count + 1) // block_size

    def held_block_count_max(self, token_count: int, *, block_size: int) -> int:
        """Blocks that a window group holds at most while it computes so many tokens at once."""
        assert self.window_token_count is not None, "full attention holds all blocks"
        return -(-(self.window_token_count - 1 + token_count) // block_size) + 1


def group_layers(
    windows: Sequence[int | None], page_shapes: Sequence[Hashable]
) -> tuple[KvGroup, ...]:
    """Forms the KV groups of a model.

    The layers of full attention are the first group. Those of a window form groups of as many
    layers; the last one of a window may be smaller, and leaves pages unused.
    A model of one kind is one group. So is one that has no layer of full attention, for a pool
    needs such a group, one whose layers differ in what a page holds, and one that would have more
    groups than a pool takes: in these a group of full attention keeps every block, and windows hide
    only what is not to be seen.

    Args:
        windows: one per layer; None: full attention.
        page_shapes: one per layer, equal where a page holds the same bytes.
    """
    assert len(windows) == len(page_shapes), (len(windows), len(page_shapes))
    by_window: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, window in enumerate(windows):
        by_window[window].append(index)
    full = by_window.pop(None, [])
    groups = [KvGroup(layer_indices=tuple(full))]
    if full and by_window and len(set(page_shapes)) == 1:
        for window, layers in sorted(by_window.items()):
            for first in range(0, len(layers), len(full)):
                groups.append(KvGroup(window, tuple(layers[first : first + len(full)])))
        if len(groups) <= GROUPS_PER_POOL_MAX:
            return tuple(groups)
    return (KvGroup(layer_indices=tuple(range(len(windows)))),)
