"""Work behind the replies, digests above all, in slices that let other calls through."""

import asyncio

from prefixd.controller.core.errors import InvariantBroken
from prefixd.controller.core.pool import Pool
from prefixd.controller.rpc.epochs import Epochs

HASH_SLICE_BLOCK_COUNT = 256
HASH_SLICE_TOKEN_COUNT = 4_096
"""What is hashed before other calls get their turn, whichever is less: well below 1 ms."""

HEAD_START_S = 0.001
"""How long a reply is ahead of the work behind it: on a machine whose cores are all busy, a driver
would otherwise wait for the work before it gets to read the reply. Forward passes take longer."""


class SlicedHashing:
    """Runs at most one chain of slices per pool; the event loop serves other calls in between."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._busy: set[Pool] = set()

    def start(self, pool: Pool) -> None:
        """Sees to it that the pool's missing digests get computed. Returns at once."""
        if pool not in self._busy:
            self._busy.add(pool)
            asyncio.get_running_loop().call_later(HEAD_START_S, self._slice, pool)

    def is_busy(self, pool: Pool) -> bool:
        """Whether digests of the pool may still be missing."""
        return pool in self._busy

    def _slice(self, pool: Pool) -> None:
        try:
            with self._epochs.ended_by_failure(pool):
                is_more = pool.hash_slice(_slice_block_count(pool.spec.block_size))
        except InvariantBroken:
            is_more = False  # It is logged, and the pool's session has got its goodbye.
        if is_more:
            asyncio.get_running_loop().call_soon(self._slice, pool)
        else:
            self._busy.discard(pool)


def _slice_block_count(block_size: int) -> int:
    return max(1, min(HASH_SLICE_BLOCK_COUNT, HASH_SLICE_TOKEN_COUNT // block_size))
