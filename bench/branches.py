"""The index at its worst, a branch at every block, against a hash map of blocks.

A tree whose nodes are runs of blocks costs time per node. Where every block of a cached prompt has
another continuation, each node is one block long, and what is left is the tree's overhead.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import cycle

import numpy as np

from bench.core import Driver
from bench.figures import Figure
from bench.hashing import LIBRARIES
from bench.measure import Timed, in_turns, ratio_of
from bench.prompts import BLOCK_SIZE, PROMPT_TOKEN_COUNT, Prompts
from prefixd.controller.core.hints import Continuation, RetentionHint
from prefixd.controller.core.messages import CloseEntry, CloseReason, Handle, TokenArray

ROUNDS = 100
PROMPT_BLOCK_COUNT = PROMPT_TOKEN_COUNT // BLOCK_SIZE
BLOCK_COUNT = 4 * PROMPT_BLOCK_COUNT


class BlockMap:
    """Blocks by digest, with reference counts and an LRU order: each block on its own.

    As much of it as admitting a prompt needs that was admitted before.
    """

    def __init__(self, block_count: int) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._reference_counts = [0] * block_count
        self._free = OrderedDict.fromkeys(range(1, block_count))
        _, self._serialise, self._digest = LIBRARIES["sha256_cbor"]
        self._root = self._digest(self._serialise("0"))

    def admit(self, token_ids: TokenArray) -> list[int]:
        """Gives a prompt its blocks, all but the last one cached ones where there are."""
        table: list[int] = []
        new_digests: list[bytes] = []
        for digest in self._chain(token_ids):
            block = self._blocks.get(digest)
            if block is None or new_digests or len(table) == len(token_ids) // BLOCK_SIZE - 1:
                new_digests.append(digest)
                continue
            if self._reference_counts[block] == 0:
                del self._free[block]
            self._reference_counts[block] += 1
            table.append(block)
        for digest in new_digests:
            block, _ = self._free.popitem(last=False)
            self._blocks.pop(self._digests.pop(block, b""), None)
            self._blocks.setdefault(digest, block)
            self._digests[block] = digest
            self._reference_counts[block] = 1
            table.append(block)
        return table

    def release(self, table: list[int]) -> None:
        """Takes a table back, its last block first."""
        for block in reversed(table):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._free[block] = None

    def _chain(self, token_ids: TokenArray) -> list[bytes]:
        digests: list[bytes] = []
        parent = self._root
        tokens = token_ids.tolist()
        for start in range(0, len(tokens), BLOCK_SIZE):
            block_tokens = tuple(tokens[start : start + BLOCK_SIZE])
            parent = self._digest(self._serialise((parent, block_tokens, None)))
            digests.append(parent)
        return digests


def branching_prompts(prompts: Prompts) -> list[TokenArray]:
    """Returns a long prompt, and one more for every block of it that goes on otherwise there."""
    trunk = prompts.next()
    branches = [
        np.concatenate((trunk[: index * BLOCK_SIZE], prompts.next(BLOCK_SIZE + 1)))
        for index in range(1, PROMPT_BLOCK_COUNT)
    ]
    return [trunk, *branches]


def branch_figures() -> list[Figure]:
    """Measures the admission and the release of a cached prompt that branches everywhere."""
    prompts = branching_prompts(Prompts(seed=7))
    trunk = prompts[0]
    block_map = BlockMap(BLOCK_COUNT)
    for prompt in prompts:
        block_map.release(block_map.admit(prompt))

    def per_block() -> None:
        block_map.release(block_map.admit(trunk))

    trees = {name: _tree(prompts, eviction_policy=name) for name in ("lru", "retention")}
    samples = in_turns(
        {"map": Timed(per_block)} | {name: Timed(tree) for name, tree in trees.items()},
        round_count=ROUNDS,
        warm_up_count=10,
    )
    return [
        Figure(
            name="core: a cached prompt in and out, a branch at every block",
            value=samples["lru"].median_us,
            unit="us",
            baseline="a hash map of blocks",
            baseline_value=samples["map"].median_us,
            ratio=ratio_of(samples["lru"], samples["map"]),
            target=2.5,
        ),
        Figure(
            name="core: the same with hints, under the policy `retention`",
            value=samples["retention"].median_us,
            unit="us",
            baseline="without, under `lru`",
            baseline_value=samples["lru"].median_us,
            ratio=ratio_of(samples["retention"], samples["lru"]),
        ),
    ]


def _tree(prompts: list[TokenArray], *, eviction_policy: str) -> Callable[[], None]:
    """Fills a pool; returns what opens and closes the first prompt, now as over, now as not."""
    driver = Driver(block_count=BLOCK_COUNT, eviction_policy=eviction_policy)
    hints = cycle((RetentionHint(Continuation.OVER), RetentionHint(Continuation.EXPECTED)))
    for prompt in prompts:
        driver.apply(driver.open_entry(prompt))
        driver.close_last()

    def tree() -> None:
        entry = driver.open_entry(prompts[0])
        driver.apply(entry)
        driver.apply(CloseEntry(Handle(entry.handle), CloseReason.FINISHED, next(hints)))

    return tree
