"""Answers a model's attention calls from its pages: stores K and V, then attends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from prefixd.worker.attention.seam import AttentionPlan
from prefixd.worker.model.attention_hook import AttentionCall, AttentionHandler
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where the KV of one layer is: the index of its KV group, and of its page memory."""

    group_index: int
    page: int


def places_of(model: LoadedModel) -> dict[nn.Module, Place]:
    """The place of each attention module."""
    by_layer = {
        layer: Place(group_index, page)
        for group_index, group in enumerate(model.groups)
        for page, layer in enumerate(group.layer_indices)
    }
    return {module: by_layer[layer] for module, layer in model.layer_indices.items()}


def paged_handler(
    places: Mapping[nn.Module, Place],
    kv: PagedKv,
    group_slots: Sequence[Tensor],
    plans: Sequence[AttentionPlan],
) -> AttentionHandler:
    """Leads each layer's call to its pages.

    Args:
        places: of the attention modules.
        kv: the pool.
        group_slots: int64 (rows,) for each KV group.
        plans: one for each KV group.
    """

    def attend(call: AttentionCall) -> Tensor:
        place = places[call.module]
        slots, plan = group_slots[place.group_index], plans[place.group_index]
        kv.store(place.page, keys=call.keys, values=call.values, slots=slots)
        return plan.attend(call.query, kv.layer(place.page), call.traits)

    return attend
