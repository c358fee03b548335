"""Which layers of a model share one block table."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


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


def group_layers(
    windows: Sequence[int | None], page_shapes: Sequence[Hashable]
) -> tuple[KvGroup, ...]:
    """Forms the KV groups of a model.

    Layers of one kind form groups of the group size, full attention first; the last group of a kind
    may be smaller, and leaves pages unused. The group size is that of the kind that leaves fewest.
    A model of one kind is one group. So is one that has no layer of full attention, for a pool
    needs such a group, and one whose layers differ in what a page holds: in these a group of full
    attention keeps every block, and windows hide only what is not to be seen.

    Args:
        windows: one per layer; None: full attention.
        page_shapes: one per layer, equal where a page holds the same bytes.
    """
    assert len(windows) == len(page_shapes), (len(windows), len(page_shapes))
    by_window: dict[int | None, list[int]] = defaultdict(list)
    for index, window in enumerate(windows):
        by_window[window].append(index)
    if len(by_window) == 1 or None not in by_window or len(set(page_shapes)) > 1:
        return (KvGroup(layer_indices=tuple(range(len(windows)))),)
    counts = [len(layers) for layers in by_window.values()]

    def page_count(size: int) -> int:
        return sum(-(-count // size) for count in counts) * size

    size = min(sorted(set(counts), reverse=True), key=page_count)
    kinds = sorted(by_window, key=lambda window: 0 if window is None else window)
    return tuple(
        KvGroup(window, tuple(by_window[window][first : first + size]))
        for window in kinds
        for first in range(0, len(by_window[window]), size)
    )
