"""The paged KV tensors of one model: the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixd.kernels.layer_kv import QUANTIZED_MAXIMA, LayerKv
from prefixd.kernels.paged_kv import PoolWriter, pool_writer

_SCALE_DTYPE = torch.float32


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

    def token_byte_count(self, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V, with the scales that an 8-bit dtype needs."""
        scales_per_token = 2 * self.kv_head_count if dtype in QUANTIZED_MAXIMA else 0
        return self.elements_per_token * dtype.itemsize + scales_per_token * _SCALE_DTYPE.itemsize


def block_byte_count(
    geometry: Sequence[LayerGeometry], *, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all page memories, to size a pool by memory."""
    return block_size * sum(layer.token_byte_count(dtype) for layer in geometry)


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
        writer: PoolWriter | None = None,
    ) -> None:
        """Makes a pool of zeros.

        Args:
            geometry: of each page memory.
            block_count: blocks, block 0 included.
            block_size: slots per block.
            dtype: of stored elements; scales come beside those of 8 bits.
            device: where it lies.
            writer: stores and copies; None: the device's own.
        """
        assert block_count >= 2, "a pool holds the padding block and at least one more"
        assert block_size >= 1, block_size
        self.block_count = block_count
        self.block_size = block_size
        slot_count = block_count * block_size

        def elements(layer: LayerGeometry, width: int) -> Tensor:
            shape = (slot_count, layer.kv_head_count, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        def scales(layer: LayerGeometry) -> Tensor | None:
            if dtype not in QUANTIZED_MAXIMA:
                return None
            shape = (slot_count, layer.kv_head_count)
            return torch.zeros(shape, dtype=_SCALE_DTYPE, device=device)

        self._pages = tuple(
            LayerKv(
                elements(layer, layer.key_width),
                elements(layer, layer.value_width),
                scales(layer),
                scales(layer),
            )
            for layer in geometry
        )
        self._writer = pool_writer(device) if writer is None else writer

    @property
    def page_count(self) -> int:
        """Page memories."""
        return len(self._pages)

    @property
    def dtype(self) -> torch.dtype:
        """Of stored elements."""
        return self._pages[0].keys.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether elements take 8 bits and have scales."""
        return self._pages[0].is_quantized

    @property
    def slot_count(self) -> int:
        """Slots of the pool, block 0 included."""
        return self.block_count * self.block_size

    @property
    def slot_byte_count(self) -> int:
        """Bytes of one slot over all page memories."""
        return self.byte_count // self.slot_count

    @property
    def byte_count(self) -> int:
        """Bytes that the pool takes on its device."""
        return sum(tensor.nbytes for page in self._pages for tensor in page.tensors)

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
        self._writer.store(
            self._pages[page], keys=keys, values=values, slots=slots, block_size=self.block_size
        )

    def copy_blocks(
        self,
        *,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        token_counts: Sequence[int],
    ) -> None:
        """Copies the first ``token_counts[i]`` tokens of each source to its target, on all pages.

        The rest of a target keeps what it held. No block is both source and target.
        """
        device = self._pages[0].keys.device
        self._writer.copy_blocks(
            self._pages,
            source_block_ids=torch.tensor(source_block_ids, dtype=torch.int64, device=device),
            target_block_ids=torch.tensor(target_block_ids, dtype=torch.int64, device=device),
            token_counts=torch.tensor(token_counts, dtype=torch.int64, device=device),
            block_size=self.block_size,
        )
