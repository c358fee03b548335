"""What the cache must have saved of the demo's questions."""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from prefixd.clients.demo.scenario import Asked


def cached_token_count_expected(asked: Asked, earlier: Iterable[Asked], *, block_size: int) -> int:
    """The whole blocks that a prompt has in common with what was computed before it.

    At least one token is always computed: its logits begin the answer.
    """
    longest = max((_common_token_count(asked.prompt_token_ids, one) for one in earlier), default=0)
    return min(longest, len(asked.prompt_token_ids) - 1) // block_size * block_size


def _common_token_count(token_ids: Sequence[int], other: Asked) -> int:
    computed = (*other.prompt_token_ids, *other.answer.token_ids)
    pairs = zip(token_ids, computed, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
