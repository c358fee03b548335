"""Tile and split sizes of attention, by table.

They decide in which order sums are taken, so they are part of the numeric contract: nothing is
tuned at run time, and a row's result does not change with the batch around it but for the choice
between a narrow and a wide tile. Every entry compiles without spills for the targets of
``prefixd.kernels.report``, which fails where one does not.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv

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


# float32 products run on the plain arithmetic units, which need many registers: small tiles only.
_FLOAT32 = (Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), Tile(16, 16, 4, 3))

# By widest head up to, bytes per query element and bytes per element of K and V: narrow, wide,
# whole. Eight-bit elements are converted in registers, so their tiles hold fewer of them.
_TILES = {
    (64, 2, 2): (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
    (64, 2, 1): (Tile(16, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    (128, 2, 2): (Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(128, 32, 8, 3)),
    (128, 2, 1): (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2), Tile(128, 32, 8, 3)),
    (256, 2, 2): (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2), Tile(64, 32, 8, 3)),
    (256, 2, 1): (Tile(16, 16, 4, 2), Tile(64, 16, 8, 2), Tile(64, 16, 8, 2)),
}

HEAD_WIDTH_MAX = 256
"""The widest head that has tiles."""

GROUP_SIZE_MAX = 128
"""Most query heads per kv head: all of them stand beside one query row in a tile."""


def power_of_two_at_least(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


def tiling_for(*, head_width: int, group_size: int, query_bytes: int, kv_bytes: int) -> Tiling:
    """Looks the tiles of a geometry up.

    Args:
        head_width: elements of a head of K or V, whichever is wider; at most HEAD_WIDTH_MAX.
        group_size: query heads per kv head.
        query_bytes: bytes per element of the query, 2 or 4.
        kv_bytes: bytes per element of K and V, 1 or those of the query.
    """
    assert 0 < head_width <= HEAD_WIDTH_MAX, f"heads of {head_width} elements have no tiles"
    assert 1 <= group_size <= GROUP_SIZE_MAX, f"{group_size} query heads per kv head have no tiles"
    tiles = _FLOAT32
    if query_bytes != 4:
        tiles = _TILES[max(64, power_of_two_at_least(head_width)), query_bytes, kv_bytes]
    # A tile holds at least one row with all its heads.
    row_tile_min = power_of_two_at_least(group_size)
    narrow, wide, whole = (
        replace(tile, row_tile=max(tile.row_tile, row_tile_min)) for tile in tiles
    )
    return Tiling(narrow, wide, whole)


def tiling_of_layer(query: Tensor, layer: LayerKv) -> Tiling:
    """The tiles for queries (rows, query heads, key width) over a layer."""
    return tiling_for(
        head_width=max(layer.key_width, layer.value_width),
        group_size=query.shape[1] // layer.head_count,
        query_bytes=query.element_size(),
        kv_bytes=layer.keys.element_size(),
    )
