"""The seam between the model and an attention backend."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.worker.attention.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What one layer asks of attention beside queries and KV.

    Attributes:
        scaling: factor of the scores.
        window_token_count: a query at q sees keys in (q - window, q]; None sees all up to q.
        softcap: scores s become softcap * tanh(s / softcap); None leaves them.
        sinks: (query heads,), one extra logit per head that takes probability and gives no value;
            None adds none.
    """

    scaling: float
    window_token_count: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of one layer; those of K and V are shared by equally many query heads."""

    query_head_count: int
    kv_head_count: int
    key_width: int
    value_width: int


def first_visible(position: int, traits: LayerTraits) -> int:
    """The first position that a query at ``position`` sees: keys lie in (q - window, q]."""
    if traits.window_token_count is None:
        return 0
    return max(0, position - traits.window_token_count + 1)


class AttentionPlan(Protocol):
    """One pass, prepared by a backend; serves every layer of it."""

    def attend(self, query: Tensor, layer: LayerKv, traits: LayerTraits) -> Tensor:
        """Attends with every row of the pass; KV of the pass is already stored.

        Args:
            query: (rows, query heads, key width).
            layer: the layer's pool.
            traits: of the layer.

        Returns:
            (rows, query heads, value width); padding rows hold anything finite.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute paged attention."""

    @property
    def is_bitwise_reproducible(self) -> bool:
        """Whether a row's result is promised to depend on its own sequence only, to the bit."""
        ...

    def refusal(self, heads: LayerHeads, traits: LayerTraits) -> str | None:
        """Why this backend cannot serve such a layer, or None where it can."""
        ...

    def padded_row_count(self, token_count: int) -> int:
        """Rows that a pass (or a selection of rows for logits) of so many tokens must have."""
        ...

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Prepares one pass."""
        ...


class StaticPlan(AttentionPlan, Protocol):
    """Attention in memory that never moves, so that a graph can record it.

    Invariants: from the second call on, `attend` takes the same memory in, and neither reads it
    from the host nor brings any to the device; it serves the pass that was loaded last.
    """

    def load(self, batch: AttentionBatch) -> None:
        """Brings a pass in: as many rows as the plan was made for, at most one per sequence.

        What uses the memory must have been started before on the same stream, and what was loaded
        before must have arrived on the device.
        """
        ...


@runtime_checkable
class RecordableBackend(Protocol):
    """An attention backend whose passes of decode can be recorded."""

    def static_plan(self, *, row_count: int, blocks_per_sequence: int) -> StaticPlan:
        """Makes a plan for passes of so many rows, padding included, over such tables at most."""
        ...
