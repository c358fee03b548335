from __future__ import annotations

import pytest

from prefixd.kernels.tiling import HEAD_WIDTH_MAX, tiling_for


@pytest.mark.parametrize("head_width", [1, 16, 64, 80, 96, 128, 192, HEAD_WIDTH_MAX])
@pytest.mark.parametrize(("query_bytes", "kv_bytes"), [(2, 2), (2, 1), (4, 4), (4, 1)])
def test_every_width_and_format_has_tiles(head_width: int, query_bytes: int, kv_bytes: int) -> None:
    """Products want at least 16 on every side, and sums the same order in every role."""
    tiling = tiling_for(
        head_width=head_width, group_size=4, query_bytes=query_bytes, kv_bytes=kv_bytes
    )
    for tile in (tiling.narrow, tiling.wide, tiling.whole):
        assert tile.row_tile >= 16
        assert tile.key_tile >= 16
        assert 0 == tiling.split_token_count % tile.key_tile


@pytest.mark.parametrize("group_size", [1, 3, 16, 17, 71, 128])
def test_a_tile_holds_a_row_with_all_its_heads(group_size: int) -> None:
    """Also where one kv head serves more query heads than a tile usually has rows."""
    tiling = tiling_for(head_width=64, group_size=group_size, query_bytes=2, kv_bytes=2)
    for tile in (tiling.narrow, tiling.wide, tiling.whole):
        assert tile.query_row_count(group_size) >= 1


def test_wider_heads_are_refused() -> None:
    """There is no tile for them that would not spill."""
    with pytest.raises(AssertionError, match="heads of 257 elements"):
        tiling_for(head_width=HEAD_WIDTH_MAX + 1, group_size=1, query_bytes=2, kv_bytes=2)
