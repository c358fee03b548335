"""A loaded model, and what a forward showed of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.model.attention_hook import AttentionContext, AttentionHandler
from prefixd.worker.model.kv_cache import LayerGeometry
from prefixd.worker.model.lora import LoraSwitch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that the guard has passed.

    Attributes:
        name: what operators and clients call it.
        network: the transformers model, in eval mode; call it through a ModelRunner only.
        context: leads its attention calls.
        layer_indices: place of each attention module in ``geometry``.
        geometry: KV shape of every layer, in the order in which a forward visits them.
        groups: the KV groups; each layer belongs to one.
        dtype: of weights, and of KV where a pool is not 8-bit.
        device: where weights and KV are.
        vocabulary_size: token ids are below it.
        context_token_count_max: positions are below it.
        end_token_ids: tokens that end an answer.
        tokenizer: the transformers tokenizer with its chat template; None where there is none, and
            the model serves token ids only.
        lora: the adapters that sequences can go through.
        folder: what the weights were read from; None: they are random.
        rank_count: processes that the model is split over; this one has its heads' part of it.
    """

    name: str
    network: Any
    context: AttentionContext
    layer_indices: Mapping[nn.Module, int]
    geometry: tuple[LayerGeometry, ...]
    groups: tuple[KvGroup, ...]
    dtype: torch.dtype
    device: torch.device
    vocabulary_size: int
    context_token_count_max: int
    end_token_ids: frozenset[int]
    tokenizer: Any | None
    lora: LoraSwitch
    folder: Path | None
    rank_count: int = 1

    @property
    def page_geometry(self) -> tuple[LayerGeometry, ...]:
        """KV shape of each page memory: as many as the largest group has layers."""
        largest = max(self.groups, key=lambda group: len(group.layer_indices))
        return tuple(self.geometry[layer] for layer in largest.layer_indices)


def call_network(
    network: Any,
    context: AttentionContext,
    handler: AttentionHandler,
    *,
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
) -> Tensor:
    """One forward of a flattened batch without any Hugging Face cache.

    Args:
        network: a transformers model for causal language modelling.
        context: of this model.
        handler: answers its attention calls.
        token_ids: int64 (rows,).
        positions: int64 (rows,).
        logit_rows: int64 (logit rows,).

    Returns:
        (logit rows, vocabulary), in the model's dtype.
    """
    with torch.inference_mode(), context.answered_by(handler):
        output = network(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
        )
    logits: Tensor = output.logits[0]
    return logits
