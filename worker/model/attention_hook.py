"""Leads the attention calls of an unmodified Hugging Face model to whoever runs it.

transformers knows attention functions by name, process-wide. The one function registered here
keeps no state: it finds the context of its model on the attention module that calls it, so any
number of models can live in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface

from prefixd.worker.attention.seam import LayerTraits

ATTENTION_NAME = "prefixd_paged"

_CONTEXT_ATTRIBUTE = "prefixd_attention_context"

# Arguments that change nothing here: there is no cache and no dropout, and positions are applied
# to queries and keys before attention is called.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "is_causal",  # reported by AttentionCall.is_causal
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention, for one flattened batch.

    Attributes:
        module: the attention module, which tells the layer.
        query: (rows, query heads, key width), after rotary embedding and normalisation.
        keys: (rows, kv heads, key width), likewise.
        values: (rows, kv heads, value width).
        traits: what the layer asks of attention.
        is_causal: False where the layer wants to see later tokens too.
        unknown_arguments: names of set arguments that nothing here understands.
    """

    module: nn.Module
    query: Tensor
    keys: Tensor
    values: Tensor
    traits: LayerTraits
    is_causal: bool
    unknown_arguments: tuple[str, ...]


AttentionHandler: TypeAlias = Callable[[AttentionCall], Tensor]
"""Answers a call with (rows, query heads, value width)."""


class AttentionContext:
    """Who answers the attention calls of one model at the moment.

    Invariant: a handler is set during a forward and at no other time.
    """

    def __init__(self) -> None:
        self._handler: AttentionHandler | None = None

    @contextmanager
    def answered_by(self, handler: AttentionHandler) -> Iterator[None]:
        """Sets the handler for one forward."""
        assert self._handler is None, "a forward of this model is already running"
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def answer(self, call: AttentionCall) -> Tensor:
        """Passes a call on."""
        assert self._handler is not None, "the model was called outside its runner"
        return self._handler(call)


def register_attention() -> None:
    """Makes ``ATTENTION_NAME`` known to transformers; again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def attach_context(network: nn.Module) -> AttentionContext:
    """Gives a model a context of its own.

    Every module gets it, because which of them call attention only a forward can tell.
    """
    context = AttentionContext()
    for module in network.modules():
        setattr(module, _CONTEXT_ATTRIBUTE, context)
    return context


def _attention(  # noqa: PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are (1, heads, rows, width); returns (1, rows, heads, width)."""
    unknown = [
        name
        for name, argument in arguments.items()
        if argument is not None and name not in _HARMLESS_ARGUMENTS
    ]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout != 0.0:
        unknown.append("dropout")
    causal = arguments.get("is_causal")
    call = AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        traits=LayerTraits(
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window_token_count=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        ),
        is_causal=getattr(module, "is_causal", True) if causal is None else bool(causal),
        unknown_arguments=tuple(unknown),
    )
    context: AttentionContext = getattr(module, _CONTEXT_ATTRIBUTE)
    return context.answer(call)[None], None
