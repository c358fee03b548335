"""Attention as a plain loop over query rows: slow, obvious, the oracle for every other backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.seam import LayerHeads, LayerTraits, first_visible


class ReferenceBackend:
    """Computes in float64 and rounds once, at the end."""

    is_bitwise_reproducible = False

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        """Serves every layer."""
        return None

    def padded_row_count(self, token_count: int) -> int:
        """Needs no padding."""
        return token_count

    def plan(self, batch: AttentionBatch) -> "ReferencePlan":
        """Prepares nothing."""
        return ReferencePlan(batch)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Reads one key at a time from where the block table says it is."""

    batch: AttentionBatch

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """See the seam."""
        output = query.new_zeros((*query.shape[:2], layer.value_width))
        for index, rows in enumerate(self.batch.sequences):
            slots = self.batch.context_slots(index)
            for offset in range(rows.query_token_count):
                position = rows.start_position + offset
                row = rows.query_start + offset
                visible = slots[first_visible(position, traits) : position + 1]
                output[row] = _attend_row(
                    query[row],
                    _read(layer.keys, layer.key_scales, visible),
                    _read(layer.values, layer.value_scales, visible),
                    traits,
                )
        return output


def _read(pool: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Some slots of a pool as float64: (tokens, kv heads, width)."""
    elements = pool[slots].double()
    return elements if scales is None else elements * scales[slots].double()[..., None]


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, traits: LayerTraits) -> Tensor:
    """One query row (query heads, width) over its visible keys (keys, kv heads, width)."""
    group_size = query.shape[0] // keys.shape[1]
    outputs = []
    for head in range(query.shape[0]):
        kv_head = head // group_size
        scores = keys[:, kv_head] @ query[head].double() * traits.scaling
        if traits.softcap is not None:
            scores = traits.softcap * torch.tanh(scores / traits.softcap)
        if traits.sinks is not None:
            scores = torch.cat([scores, traits.sinks[head].double()[None]])
        weights = torch.softmax(scores, dim=0)[: keys.shape[0]]
        outputs.append(weights @ values[:, kv_head])
    return torch.stack(outputs).to(query.dtype)
