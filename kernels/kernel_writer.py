"""Stores and copies on a paged pool by the kernels."""

from collections.abc import Sequence

from torch import Tensor

from prefixd.kernels.copy_blocks import copy_blocks
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.store import store_kv


class KernelPoolWriter:
    """A launch per layer to store, and one per tensor of a layer to copy."""

    def store(
        self, layer: LayerKv, *, keys: Tensor, values: Tensor, slots: Tensor, block_size: int
    ) -> None:
        """See ``paged_kv.PoolWriter``."""
        store_kv(layer, keys=keys, values=values, slots=slots, block_size=block_size)

    def copy_blocks(
        self,
        layers: Sequence[LayerKv],
        *,
        source_block_ids: Tensor,
        target_block_ids: Tensor,
        token_counts: Tensor,
        block_size: int,
    ) -> None:
        """See ``paged_kv.PoolWriter``."""
        for layer in layers:
            for pool in layer.tensors:
                copy_blocks(
                    pool,
                    source_block_ids=source_block_ids,
                    target_block_ids=target_block_ids,
                    token_counts=token_counts,
                    block_size=block_size,
                )
