"""The fast backend: PyTorch's fused attention over the pages of one sequence at a time.

A run of consecutive blocks is read in place; other tables are gathered first. Query rows are
taken in tiles, so a cold prefill computes little above the diagonal and no mask grows large.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from prefixd.worker.attention.batch import AttentionBatch, SequenceRows
from prefixd.worker.attention.seam import LayerTraits, first_visible

QUERY_TILE_ROW_COUNT = 128


class SdpaBackend:
    """Fast on CPU, correct on any device; results depend on the batch in the last bits."""

    is_bitwise_reproducible = False

    def refusal(self, traits: LayerTraits) -> str | None:
        """Serves every layer."""
        return None

    def padded_row_count(self, token_count: int) -> int:
        """Needs no padding."""
        return token_count

    def plan(self, batch: AttentionBatch) -> "SdpaPlan":
        """Finds out where the pages of each sequence lie."""
        contexts = tuple(
            _context_of(batch, index, rows) for index, rows in enumerate(batch.sequences)
        )
        return SdpaPlan(contexts)


@dataclass(frozen=True, slots=True)
class _Context:
    """One sequence's rows and its pages: a slice of the pool, or the slots one by one."""

    rows: SequenceRows
    slots: slice | Tensor

    def read(self, pool: Tensor) -> Tensor:
        """The context's K or V: (context tokens, kv heads, width), a view where it can be."""
        if isinstance(self.slots, slice):
            return pool[self.slots]
        return pool.index_select(0, self.slots)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some query rows of one sequence, relative to its first, and the positions they read."""

    first_row: int
    end_row: int
    first_position: int
    end_position: int
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Contexts of the pass, and its masks per window, made once and used by every layer."""

    contexts: tuple[_Context, ...]
    _tiles: dict[int | None, tuple[tuple[_Tile, ...], ...]] = field(default_factory=dict)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, traits: LayerTraits) -> Tensor:
        """See the seam."""
        output = query.new_zeros((*query.shape[:2], values.shape[-1]))
        attend_tile = _attend_fused if _is_plain(traits) else _attend_composed
        for context, tiles in zip(self.contexts, self._tiles_for(query, traits), strict=True):
            context_keys, context_values = context.read(keys), context.read(values)
            for tile in tiles:
                start = context.rows.query_start
                rows = slice(start + tile.first_row, start + tile.end_row)
                positions = slice(tile.first_position, tile.end_position)
                output[rows] = attend_tile(
                    query[rows], context_keys[positions], context_values[positions], tile, traits
                )
        return output

    def _tiles_for(self, query: Tensor, traits: LayerTraits) -> tuple[tuple[_Tile, ...], ...]:
        window = traits.window_token_count
        if window not in self._tiles:
            self._tiles[window] = tuple(
                tuple(_tiles_of(context.rows, traits, query)) for context in self.contexts
            )
        return self._tiles[window]


def _context_of(batch: AttentionBatch, index: int, rows: SequenceRows) -> _Context:
    block_count = -(-rows.context_token_count // batch.block_size)
    first = rows.block_ids[0]
    if rows.block_ids[:block_count] == tuple(range(first, first + block_count)):
        start = first * batch.block_size
        return _Context(rows, slice(start, start + rows.context_token_count))
    return _Context(rows, batch.context_slots(index))


def _tiles_of(rows: SequenceRows, traits: LayerTraits, query: Tensor) -> list[_Tile]:
    tiles = []
    for first_row in range(0, rows.query_token_count, QUERY_TILE_ROW_COUNT):
        end_row = min(first_row + QUERY_TILE_ROW_COUNT, rows.query_token_count)
        start = rows.start_position + first_row
        end = rows.start_position + end_row
        first = first_visible(start, traits)
        bias = None
        # A single row sees everything from `first` to itself.
        if end_row - first_row > 1:
            window = traits.window_token_count
            bias = _bias(query, start=start, end=end, first=first, window=window)
        tiles.append(_Tile(first_row, end_row, first, end, bias))
    return tiles


def _bias(query: Tensor, *, start: int, end: int, first: int, window: int | None) -> Tensor:
    """0 where a query at [start, end) sees a key at [first, end), minus infinity elsewhere."""
    queries = torch.arange(start, end, device=query.device)[:, None]
    keys = torch.arange(first, end, device=query.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -torch.inf)


def _is_plain(traits: LayerTraits) -> bool:
    return traits.softcap is None and traits.sinks is None


def _attend_fused(
    query: Tensor, keys: Tensor, values: Tensor, tile: _Tile, traits: LayerTraits
) -> Tensor:
    """(rows, query heads, width) over (positions, kv heads, width)."""
    row_count, head_count, width = query.shape
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if tile.bias is None:
        # The query heads of one kv head become the rows of one product: K is read once for them.
        packed = query.reshape(1, keys.shape[1], -1, width)
        output = functional.scaled_dot_product_attention(packed, keys, values, scale=traits.scaling)
        return output.reshape(row_count, head_count, -1)
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=tile.bias,
        scale=traits.scaling,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def _attend_composed(
    query: Tensor, keys: Tensor, values: Tensor, tile: _Tile, traits: LayerTraits
) -> Tensor:
    """The same with soft capping and sinks, which the fused kernels lack."""
    row_count, head_count, _ = query.shape
    group_size = head_count // keys.shape[1]
    keys = keys.repeat_interleave(group_size, dim=1).permute(1, 2, 0)
    values = values.repeat_interleave(group_size, dim=1).transpose(0, 1)
    scores = torch.matmul(query.transpose(0, 1), keys).float() * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    if tile.bias is not None:
        scores = scores + tile.bias
    if traits.sinks is not None:
        sinks = traits.sinks.float()[:, None, None].expand(-1, row_count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-1]]
    return torch.matmul(weights.to(values.dtype), values).transpose(0, 1)
