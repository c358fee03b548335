"""What others than the driver do between two steps, to a pool of the core and the naive model."""

import numpy as np

from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.messages import BlockId, Identity
from prefixd.controller.core.pool import Pool
from tests.model.eviction import evict
from tests.model.sequence import Place
from tests.model.steps import NaiveLog


def match_both(pool: Pool, model: NaiveLog, token_ids: list[int], identity: Identity) -> None:
    """Matching agrees; that it changes nothing is to be compared behind it (S8)."""
    found = pool.match_prefix(np.array(token_ids, np.uint32), identity)
    assert found == model.match_prefix(token_ids, identity)


def flush_both(pool: Pool, model: NaiveLog) -> None:
    """A flush drops the same blocks or is refused with the same counts (S21)."""
    try:
        expected: object = model.flush()
    except BlocksInUse as refused:
        expected = refused.numbers
    try:
        dropped: object = pool.flush()
    except BlocksInUse as refused:
        dropped = refused.numbers
    assert dropped == expected


def bump_both(pool: Pool, model: NaiveLog, model_version: str) -> None:
    """Another version of the weights comes into force (S4)."""
    dropped = pool.set_model_version(model_version)
    assert dropped == model.set_model_version(model_version)


def evict_both(
    pool: Pool, model: NaiveLog, prompt: list[int], number: int, *, algorithm: str, root: bytes
) -> None:
    """Evicts a block, of a prompt if it can be, and for some numbers what any other one may hold;
    published ones by their digests or not (S13, S19)."""
    usable_count = model.spec.block_count - 1
    indexed = model.indexed()
    of_prompt = [block for block, (_, place) in indexed.items() if _begins(prompt, place)]
    candidates = of_prompt or [*indexed, BlockId(1)]
    named = {candidates[number % len(candidates)]}
    if number % 4 == 0:
        named.add(BlockId(1 + number * 7 % usable_count))
    published = model.published()
    digested = {published[block] for block in named if block in published and number % 3 == 0}
    named = {block for block in named if published.get(block) not in digested}
    digests = {model.digest_of(place, algorithm=algorithm, root=root) for place in digested}
    dropped = pool.evict_blocks(block_ids=named, digests=digests)
    expected = evict(model, named, digested)
    assert (dropped.block_count, dropped.held_block_count) == expected


def _begins(prompt: list[int], place: Place) -> bool:
    tokens = [token for token_ids, _ in place for token in token_ids]
    return prompt[: len(tokens)] == tokens
