"""Bitwise reproducible attention: a row's result depends on its own sequence and on nothing else.

Not on the rows beside it, nor on how the sequence was cut into passes, nor on where its blocks
lie. Three things make it so, in float32 on the CPU with one thread:

- Every sum over keys runs over fixed tiles of 64 positions, counted from position 0, and the tiles
  are added in order. The maximum is exact in any order, so it needs no tiles, and with the final
  maximum known no partial result is ever rescaled. A tile a row does not see adds exact zeros.
- Every other sum (over a head's width, over a layer's inputs) runs inside a matrix product, whose
  value for a row depends on the product's row count only below four: there, BLAS takes other
  kernels. So a product never has fewer than four rows, and always a multiple of four.
- The order of everything else is that of one row.

The guard verifies on the machine itself that a model's chunked and unchunked passes are equal.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch, SequenceRows
from prefixd.worker.attention.pages import ReadBuffer
from prefixd.worker.attention.seam import LayerHeads, LayerTraits, first_visible

KEY_TILE_TOKEN_COUNT = 64
QUERY_TILE_ROW_COUNT = 64
ROW_MULTIPLE = 4


def round_up(count: int, *, multiple: int) -> int:
    """The smallest multiple that is at least ``count``."""
    return -(-count // multiple) * multiple


class StrictBackend:
    """Cached output is exactly uncached output, at some cost in speed."""

    is_bitwise_reproducible = True

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        """Serves every layer."""
        return None

    def padded_row_count(self, token_count: int) -> int:
        """A multiple of four, so that the layers' own products are reproducible as well."""
        return round_up(token_count, multiple=ROW_MULTIPLE)

    def plan(self, batch: AttentionBatch) -> "StrictPlan":
        """Prepares nothing yet: what to read shows with the first layer of each window."""
        return StrictPlan(batch)


@dataclass(frozen=True, slots=True)
class StrictPlan:
    """What each sequence reads, per window: made once and used by every such layer."""

    batch: AttentionBatch
    _contexts: dict[int | None, tuple["_Context", ...]] = field(default_factory=dict)
    _key_buffer: ReadBuffer = field(default_factory=ReadBuffer)
    _value_buffer: ReadBuffer = field(default_factory=ReadBuffer)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        output = query.new_zeros((*query.shape[:2], layer.value_width))
        for context in self._contexts_for(traits):
            rows = context.rows
            context_keys = self._key_buffer.keys(layer, context.slots, query.dtype)
            context_values = self._value_buffer.values(layer, context.slots, query.dtype)
            for first in range(0, rows.query_token_count, QUERY_TILE_ROW_COUNT):
                count = min(QUERY_TILE_ROW_COUNT, rows.query_token_count - first)
                start = rows.query_start + first
                position = rows.start_position + first
                output[start : start + count] = _attend_tile(
                    query[start : start + count],
                    context_keys,
                    context_values,
                    traits,
                    start_position=position,
                    context_start=context.first_position,
                )
        return output

    def _contexts_for(self, traits: LayerTraits) -> tuple["_Context", ...]:
        window = traits.window_token_count
        if window not in self._contexts:
            self._contexts[window] = tuple(
                _context(self.batch, index, traits) for index in range(len(self.batch.sequences))
            )
        return self._contexts[window]


@dataclass(frozen=True, slots=True)
class _Context:
    """Slots of whole key tiles, from the first that a sequence's rows see to their last."""

    rows: SequenceRows
    first_position: int
    slots: Tensor


def _context(batch: AttentionBatch, index: int, traits: LayerTraits) -> _Context:
    rows = batch.sequences[index]
    seen = first_visible(rows.start_position, traits)
    first = seen // KEY_TILE_TOKEN_COUNT * KEY_TILE_TOKEN_COUNT
    end = round_up(rows.context_token_count, multiple=KEY_TILE_TOKEN_COUNT)
    slots = batch.context_slots(index)[seen:]
    # Before the first token that a row sees stands that token again, and behind the last one that
    # one: their K and V are finite whenever the sequence's own are, and no row sees them there.
    before = slots[:1].expand(seen - first)
    behind = slots[-1:].expand(end - rows.context_token_count)
    return _Context(rows, first, torch.cat([before, slots, behind]))


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    traits: LayerTraits,
    *,
    start_position: int,
    context_start: int,
) -> Tensor:
    """Rows at consecutive positions over the key tiles that any of them sees.

    Args:
        query: (rows, query heads, width).
        keys: (padded context tokens, kv heads, width).
        values: (padded context tokens, kv heads, width).
        traits: of the layer.
        start_position: of the first row.
        context_start: position of the first key, which begins a tile.
    """
    row_count = query.shape[0]
    first = first_visible(start_position, traits) // KEY_TILE_TOKEN_COUNT * KEY_TILE_TOKEN_COUNT
    end = round_up(start_position + row_count, multiple=KEY_TILE_TOKEN_COUNT)
    read = slice(first - context_start, end - context_start)

    packed = _pack_groups(query, kv_head_count=keys.shape[1])
    scores = torch.matmul(packed.flatten(1, 2), keys[read].permute(1, 2, 0))
    scores = scores.view(*packed.shape[:3], -1).mul_(traits.scaling)
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    _hide(scores, traits, start_position=start_position, first_key=first)

    peak = scores.amax(dim=-1, keepdim=True)
    if traits.sinks is None:
        weights = scores.sub_(peak).exp_()
        sums = _sum_of(weights)
    else:
        sinks = traits.sinks.to(scores.dtype).view(*packed.shape[:2], 1, 1)
        peak = torch.maximum(peak, sinks)
        weights = scores.sub_(peak).exp_()
        sums = _sum_of(weights) + torch.exp(sinks - peak)
    output = _weighted_sum(weights.flatten(1, 2), values[read]).view(*packed.shape[:3], -1)
    return (output / sums)[:, :, :row_count].flatten(0, 1).transpose(0, 1)


def _pack_groups(query: Tensor, *, kv_head_count: int) -> Tensor:
    """(kv heads, query heads of each, padded rows, width), the rows padded with zeros."""
    row_count, head_count, width = query.shape
    packed = query.new_zeros((head_count, round_up(row_count, multiple=ROW_MULTIPLE), width))
    packed[:, :row_count] = query.transpose(0, 1)
    return packed.view(kv_head_count, -1, *packed.shape[1:])


def _hide(scores: Tensor, traits: LayerTraits, *, start_position: int, first_key: int) -> None:
    """Sets to minus infinity what a row does not see: (..., rows, keys), in place."""
    row_count, key_count = scores.shape[-2:]
    queries = torch.arange(start_position, start_position + row_count, device=scores.device)
    keys = torch.arange(first_key, first_key + key_count, device=scores.device)
    if traits.window_token_count is None:
        # Every row sees all keys before the first row.
        diagonal = start_position - first_key
        scores[..., diagonal:].masked_fill_(keys[None, diagonal:] > queries[:, None], -torch.inf)
        return
    hidden = keys > queries[:, None]
    hidden |= keys <= queries[:, None] - traits.window_token_count
    scores.masked_fill_(hidden, -torch.inf)


def _sum_of(weights: Tensor) -> Tensor:
    """Sums (..., keys) tile by tile in order: (..., 1)."""
    tiles = weights.view(*weights.shape[:-1], -1, KEY_TILE_TOKEN_COUNT).sum(dim=-1)
    return tiles.cumsum(dim=-1)[..., -1:]


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Sums (kv heads, rows, keys) over (keys, kv heads, width), tile by tile in order."""
    values = values.transpose(0, 1)
    total = torch.matmul(weights[..., :KEY_TILE_TOKEN_COUNT], values[:, :KEY_TILE_TOKEN_COUNT])
    for start in range(KEY_TILE_TOKEN_COUNT, weights.shape[-1], KEY_TILE_TOKEN_COUNT):
        tile = slice(start, start + KEY_TILE_TOKEN_COUNT)
        total += torch.matmul(weights[..., tile], values[:, tile])
    return total
