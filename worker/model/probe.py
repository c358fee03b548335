"""One forward over a few tokens that shows how a model calls attention."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prefixd.worker.attention.seam import LayerHeads, LayerTraits
from prefixd.worker.model.attention_hook import AttentionCall, AttentionContext
from prefixd.worker.model.errors import ModelRefused
from prefixd.worker.model.kv_cache import LayerGeometry
from prefixd.worker.model.loaded import call_network

PROBE_TOKEN_COUNT = 4


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One attention call of the probe, in the order of the calls."""

    module: nn.Module
    heads: LayerHeads
    traits: LayerTraits
    is_causal: bool
    unknown_arguments: tuple[str, ...]

    @property
    def geometry(self) -> LayerGeometry:
        """Shape of its KV."""
        heads = self.heads
        return LayerGeometry(heads.kv_head_count, heads.key_width, heads.value_width)


def probe_layers(
    network: Any, context: AttentionContext, *, model_name: str
) -> tuple[ProbedLayer, ...]:
    """Records every attention call of one forward.

    Raises:
        ModelRefused: the model cannot be called with positions and a choice of logit rows, or its
            forward fails, or makes NaN.
    """
    if "logits_to_keep" not in inspect.signature(network.forward).parameters:
        raise ModelRefused(
            model_name=model_name, reason="its forward has no logits_to_keep argument"
        )
    layers: list[ProbedLayer] = []
    results: list[Tensor] = []

    def record(call: AttentionCall) -> Tensor:
        layers.append(_layer_of(call))
        results.extend((call.query, call.keys, call.values))
        return call.query.new_zeros((*call.query.shape[:2], call.values.shape[-1]))

    rows = torch.arange(PROBE_TOKEN_COUNT, device=network.device)
    try:
        results.append(
            call_network(
                network, context, record, token_ids=rows, positions=rows, logit_rows=rows[:1]
            )
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"a forward of {PROBE_TOKEN_COUNT} tokens fails: {error}"
        raise ModelRefused(model_name=model_name, reason=reason) from error
    if any(bool(result.isnan().any()) for result in results):
        reason = f"a forward of {PROBE_TOKEN_COUNT} tokens makes NaN: its weights are damaged"
        raise ModelRefused(model_name=model_name, reason=reason)
    return tuple(layers)


def _layer_of(call: AttentionCall) -> ProbedLayer:
    return ProbedLayer(
        module=call.module,
        heads=LayerHeads(
            query_head_count=call.query.shape[1],
            kv_head_count=call.keys.shape[1],
            key_width=call.keys.shape[2],
            value_width=call.values.shape[2],
        ),
        traits=call.traits,
        is_causal=call.is_causal,
        unknown_arguments=call.unknown_arguments,
    )
