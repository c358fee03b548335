"""The fast backend: PyTorch's fused attention for prefill, a cascade of products for decode.

Prefill goes sequence by sequence in tiles of query rows, so a cold prefill computes little above
the diagonal and no mask grows large. Decode rows go together (see cascade.py), except where a
layer has a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch, SequenceRows
from prefixd.worker.attention.cascade import DecodeCascade, build_cascade
from prefixd.worker.attention.pages import ReadBuffer, Stretch, whole_stretch
from prefixd.worker.attention.seam import LayerHeads, LayerTraits, first_visible

QUERY_TILE_ROW_COUNT = 128


class SdpaBackend:
    """Fast on CPU, correct on any device; results depend on the batch in the last bits."""

    is_bitwise_reproducible = False

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        """Serves every layer."""
        return None

    def padded_row_count(self, token_count: int) -> int:
        """Needs no padding."""
        return token_count

    def plan(self, batch: AttentionBatch) -> "SdpaPlan":
        """Separates decode rows from the rest."""
        single = [rows for rows in batch.sequences if rows.query_token_count == 1]
        several = [rows for rows in batch.sequences if rows.query_token_count > 1]
        cascade = None
        if single:
            device = batch.slots.device
            cascade = build_cascade(single, block_size=batch.block_size, device=device)
        return SdpaPlan(batch, tuple(several), cascade)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some query rows of a sequence: rows of the pass, and what they read of its stretch."""

    rows: slice
    keys: slice
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one sequence reads in a layer, and its query tiles over it."""

    stretch: Stretch
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Contexts of the pass and its masks per window, made once and used by every layer.

    ``several`` are the sequences with more than one row, ``cascade`` holds the others.
    """

    batch: AttentionBatch
    several: tuple[SequenceRows, ...]
    cascade: DecodeCascade | None
    _readings: dict[int | None, tuple[_Reading, ...]] = field(default_factory=dict)
    _key_buffer: ReadBuffer = field(default_factory=ReadBuffer)
    _value_buffer: ReadBuffer = field(default_factory=ReadBuffer)

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        output = query.new_zeros((*query.shape[:2], layer.value_width))
        if self.cascade is not None and traits.window_token_count is None:
            output[self.cascade.rows] = self.cascade.attend(query, layer, traits)
        is_plain = traits.softcap is None and traits.sinks is None
        attend_tile = _attend_fused if is_plain else _attend_composed
        for reading in self._readings_for(query, traits):
            read_keys = self._key_buffer.keys(layer, reading.stretch.slots, query.dtype)
            read_values = self._value_buffer.values(layer, reading.stretch.slots, query.dtype)
            for tile in reading.tiles:
                output[tile.rows] = attend_tile(
                    query[tile.rows], read_keys[tile.keys], read_values[tile.keys], tile, traits
                )
        return output

    def _readings_for(self, query: Tensor, traits: LayerTraits) -> tuple[_Reading, ...]:
        window = traits.window_token_count
        if window not in self._readings:
            sequences = self.several if window is None else self.batch.sequences
            self._readings[window] = _build_readings(
                sequences, traits, query, block_size=self.batch.block_size
            )
        return self._readings[window]


def _build_readings(
    sequences: Sequence[SequenceRows], traits: LayerTraits, query: Tensor, *, block_size: int
) -> tuple[_Reading, ...]:
    readings = []
    for rows in sequences:
        first_position = first_visible(rows.start_position, traits)
        stretch = whole_stretch(
            np.asarray(rows.block_ids, dtype=np.int64),
            first_position=first_position,
            end_position=rows.context_token_count,
            block_size=block_size,
            device=query.device,
        )
        tiles = tuple(
            _tile(rows, traits, query, first_row=first_row, first_position=first_position)
            for first_row in range(0, rows.query_token_count, QUERY_TILE_ROW_COUNT)
        )
        readings.append(_Reading(stretch, tiles))
    return tuple(readings)


def _tile(
    rows: SequenceRows, traits: LayerTraits, query: Tensor, *, first_row: int, first_position: int
) -> _Tile:
    """Rows from ``first_row`` of a sequence over a stretch that begins at ``first_position``."""
    end_row = min(first_row + QUERY_TILE_ROW_COUNT, rows.query_token_count)
    start, end = rows.start_position + first_row, rows.start_position + end_row
    first_key = first_visible(start, traits)
    bias = None
    # A single row sees everything from `first_key` to itself.
    if end - start > 1:
        window = traits.window_token_count
        bias = _bias(query, start=start, end=end, first_key=first_key, window=window)
    return _Tile(
        rows=slice(rows.query_start + first_row, rows.query_start + end_row),
        keys=slice(first_key - first_position, end - first_position),
        bias=bias,
    )


def _bias(query: Tensor, *, start: int, end: int, first_key: int, window: int | None) -> Tensor:
    """0 where a query at [start, end) sees a key at [first_key, end), minus infinity elsewhere."""
    queries = torch.arange(start, end, device=query.device)[:, None]
    keys = torch.arange(first_key, end, device=query.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -torch.inf)


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
