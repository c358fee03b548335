"""The paged KV tensors of one model: the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.paged_kv import block_slots, copy_slots, store_rows


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's KV: heads, and elements per head of K and of V."""

    kv_head_count: int
    key_width: int
    value_width: int

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V together for one token."""
        return self.kv_head_count * (self.key_width + self.value_width)


def block_byte_count(
    geometry: Sequence[LayerGeometry], *, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all page memories, to size a pool by memory."""
    elements_per_token = sum(layer.elements_per_token for layer in geometry)
    return block_size * elements_per_token * dtype.itemsize


class PagedKv:
    """K and V of ``block_count`` blocks of ``block_size`` slots, in one or more page memories.

    A block has one page in each; they serve the layers of the KV group that the block belongs to.
    Where all layers are one group, each layer has a page memory of its own.

    Invariants: block 0 belongs to padding rows, no sequence reads it; the tensors never move and
    never change size.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        block_count: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert block_count >= 2, "a pool holds the padding block and at least one more"
        assert block_size >= 1, block_size
        self.block_count = block_count
        self.block_size = block_size
        slot_count = block_count * block_size

        def zeros(layer: LayerGeometry, width: int) -> Tensor:
            shape = (slot_count, layer.kv_head_count, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._pages = tuple(
            LayerKv(zeros(layer, layer.key_width), zeros(layer, layer.value_width))
            for layer in geometry
        )

    @property
    def page_count(self) -> int:
        """Page memories."""
        return len(self._pages)

    @property
    def slot_count(self) -> int:
        """Slots of the pool, block 0 included."""
        return self.block_count * self.block_size

    @property
    def byte_count(self) -> int:
        """Bytes that the pool takes on its device."""
        return sum(page.keys.nbytes + page.values.nbytes for page in self._pages)

    def layer(self, page: int) -> LayerKv:
        """One page memory, as attention reads it."""
        return self._pages[page]

    def store(self, page: int, *, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes K and V of some tokens to one page memory.

        Args:
            page: index of the page memory.
            keys: (tokens, kv heads, key width).
            values: (tokens, kv heads, value width).
            slots: int64 (tokens,).
        """
        layer = self._pages[page]
        store_rows(layer.keys, keys, slots)
        store_rows(layer.values, values, slots)

    def copy_blocks(
        self,
        *,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        token_counts: Sequence[int],
    ) -> None:
        """Copies the first ``token_counts[i]`` tokens of each source to its target, on all pages.

        The rest of a target keeps what it held. Every source is read before a target is written.
        """
        device = self._pages[0].keys.device
        counts = torch.tensor(token_counts, dtype=torch.int64, device=device)
        source_ids = torch.tensor(source_block_ids, dtype=torch.int64, device=device)
        target_ids = torch.tensor(target_block_ids, dtype=torch.int64, device=device)
        source_slots = block_slots(source_ids, counts, block_size=self.block_size)
        target_slots = block_slots(target_ids, counts, block_size=self.block_size)
        for page in self._pages:
            for pool in (page.keys, page.values):
                copy_slots(pool, source_slots=source_slots, target_slots=target_slots)
