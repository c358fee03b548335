"""Tile and split sizes of attention, by table.

They decide in which order sums are taken, so they are part of the numeric contract: nothing is
tuned at run time, and a row's result does not change with the batch around it but for the choice
between a narrow and a wide tile. Every entry compiles without spills for the targets of
``prefixd.kernels.report``, which fails where one does not.
"""

from dataclasses import dataclass, replace

SPLIT_TOKEN_COUNT = 512
"""Positions of one split; splits begin at absolute multiples of it, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share of attention.

    Attributes:
        row_tile: query rows times query heads of one kv head; the left side of both products.
        key_tile: positions per turn of the loop.
        warp_count: warps of the program.
        stage_count: depth of the load pipeline.
    """

    row_tile: int
    key_tile: int
    warp_count: int
    stage_count: int

    def query_row_count(self, group_size: int) -> int:
        """Query rows that fit beside their ``group_size`` query heads."""
        return self.row_tile // group_size


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a layer's geometry.

    Attributes:
        narrow: for splits that few rows read, as in decode.
        wide: for splits that many rows read, as in decode over a shared prefix.
        whole: for long queries, which are not split.
        split_token_count: positions of one split.
    """

    narrow: Tile
    wide: Tile
    whole: Tile
    split_token_count: int = SPLIT_TOKEN_COUNT


# By widest head up to and bytes per query element: narrow, wide, whole.
_TILES = {
    (64, 2): (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    (128, 2): (Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(128, 64, 8, 2)),
    (256, 2): (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    (64, 4): (Tile(16, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    (128, 4): (Tile(16, 32, 4, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    (256, 4): (Tile(16, 16, 4, 2), Tile(64, 16, 8, 2), Tile(64, 16, 8, 2)),
}

HEAD_WIDTH_MAX = 256
"""The widest head that has tiles."""


def power_of_two_at_least(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


def tiling_for(*, head_width: int, group_size: int, bytes_per_element: int) -> Tiling:
    """Looks the tiles of a geometry up.

    Args:
        head_width: elements of a head of K or V, whichever is wider; at most HEAD_WIDTH_MAX.
        group_size: query heads per kv head.
        bytes_per_element: of the query, 2 or 4.
    """
    assert 0 < head_width <= HEAD_WIDTH_MAX, f"heads of {head_width} elements have no tiles"
    assert group_size >= 1, group_size
    width = max(64, power_of_two_at_least(head_width))
    # A tile holds at least one row with all its heads.
    row_tile_min = power_of_two_at_least(group_size)
    narrow, wide, whole = (
        replace(tile, row_tile=max(tile.row_tile, row_tile_min))
        for tile in _TILES[width, bytes_per_element]
    )
    return Tiling(narrow, wide, whole)
