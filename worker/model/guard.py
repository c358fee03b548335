"""Refuses models that paged attention would compute wrongly, with the reason.

Three looks, from cheap to dear: at the configuration, at how a forward calls attention, and at the
numbers of a small copy against the model's own eager attention (see numeric_probe.py).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.model.errors import ModelRefused
from prefixd.worker.model.probe import ProbedLayer

# Their rotary table depends on the longest position of the whole batch, so a neighbour would
# change the keys of a cached block.
BATCH_DEPENDENT_ROPE_TYPES = frozenset({"dynamic", "longrope"})

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

CONTEXT_TOKEN_COUNT_MIN = 32
"""Prompts of the small copy have almost as many tokens."""


def check_config(config: Any, *, model_name: str) -> None:
    """Looks at what the configuration tells before any weight is read.

    Raises:
        ModelRefused: with the first reason found.
    """
    reason = _config_reason(config)
    if reason is not None:
        raise ModelRefused(model_name=model_name, reason=reason)


def check_layers(
    layers: Sequence[ProbedLayer], config: Any, backend: AttentionBackend, *, model_name: str
) -> None:
    """Looks at the attention calls of one forward.

    Args:
        layers: as probed, one per call.
        config: of the text model.
        backend: must serve every layer.
        model_name: for the error.

    Raises:
        ModelRefused: with the first reason found.
    """
    reason = _calls_reason(layers, layer_count=config.num_hidden_layers)
    if reason is not None:
        raise ModelRefused(model_name=model_name, reason=reason)
    for index, layer in enumerate(layers):
        reason = _layer_reason(layer, backend)
        if reason is not None:
            raise ModelRefused(model_name=model_name, reason=f"layer {index}: {reason}")
    if getattr(config, "max_position_embeddings", None) is None:
        reason = "its configuration states no max_position_embeddings"
        raise ModelRefused(model_name=model_name, reason=reason)


def _config_reason(config: Any) -> str | None:
    text_config = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    context_token_count_max = getattr(text_config, "max_position_embeddings", None)
    if context_token_count_max is not None and context_token_count_max < CONTEXT_TOKEN_COUNT_MIN:
        return (
            f"its context of {context_token_count_max} tokens (max_position_embeddings) is shorter"
            f" than the {CONTEXT_TOKEN_COUNT_MIN} that a look at its numbers takes"
        )
    if _has_alibi(text_config):
        return "its attention adds a bias by distance (ALiBi), which paged attention does not"
    for rope_type in _rope_types(getattr(text_config, "rope_parameters", None)):
        if rope_type in BATCH_DEPENDENT_ROPE_TYPES:
            return f"RoPE type {rope_type!r} depends on the longest position of the batch"
    for index, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        if layer_type not in SERVED_LAYER_TYPES:
            return f"layer {index} is of type {layer_type!r}, which paged KV does not hold"
    return None


def _has_alibi(config: Any) -> bool:
    """Whether a configuration says so: at its top, or among the settings of attention."""
    settings = getattr(config, "attn_config", None)
    return bool(getattr(config, "alibi", False) or getattr(settings, "alibi", False))


def _rope_types(parameters: object) -> Iterator[str]:
    """All RoPE types named at any depth: one per model, or one per layer type."""
    if not isinstance(parameters, Mapping):
        return
    for key, value in parameters.items():
        if key in {"rope_type", "type"} and isinstance(value, str):
            yield value
        else:
            yield from _rope_types(value)


def _calls_reason(layers: Sequence[ProbedLayer], *, layer_count: int) -> str | None:
    if not layer_count:
        return "it has no layers, so there is no KV to keep"
    if len(layers) != layer_count:
        return f"a forward calls attention {len(layers)} times, but it has {layer_count} layers"
    calls = Counter(layer.module for layer in layers)
    if len(calls) != layer_count:
        return f"its {layer_count} layers share {len(calls)} attention modules"
    return None


def _layer_reason(layer: ProbedLayer, backend: AttentionBackend) -> str | None:
    if not layer.is_causal:
        return "its attention is not causal"
    if layer.unknown_arguments:
        return f"attention gets unknown arguments: {', '.join(layer.unknown_arguments)}"
    return backend.refusal(layer.heads, layer.traits)
