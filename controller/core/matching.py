"""Finding the longest cached prefix of a prompt (S6, S7), to the token where a pool allows it.

A partial match ends inside an indexed block: its leading tokens equal the prompt's next ones, and
its extra keys those of the prompt's block. They are copied into a block of the new sequence's own.
"""

from collections.abc import Iterator

import numpy as np

from prefixd.controller.core.identity import SequenceKeys
from prefixd.controller.core.match import Match, PartialMatch
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.node import Lane, Node
from prefixd.controller.core.sequences import TOKEN_BYTES
from prefixd.controller.core.state import PoolState
from prefixd.controller.core.step_log import EXECUTED
from prefixd.controller.core.window_blocks import WindowPlace
from prefixd.controller.core.window_matching import agreed_end, join_windows, partial_sources


def find_prefix(
    state: PoolState,
    keys: SequenceKeys,
    packed_tokens: bytes,
    *,
    step_id: StepId,
    start_block: int = 0,
    leaf: Node | None = None,
) -> Match:
    """Match a prompt but for its last token, behind `leaf`, which covers `start_block` blocks.

    Changes nothing (S8). `step_id` is the step that would read the match.
    """
    token_count_max = len(packed_tokens) // TOKEN_BYTES - 1
    block_size = state.spec.block_size
    if state.windows.count:
        match = _find_agreed(state, keys, packed_tokens, start_block, leaf)
    else:
        match = state.index.match(
            keys,
            packed_tokens,
            end_block=token_count_max // block_size,
            start_block=start_block,
            leaf=leaf,
        )
    if state.spec.sub_block_reuse:
        partial = _find_partial(state, keys, packed_tokens, match, leaf, step_id)
        if partial is not None:
            match.partial = partial
            match.idle_count += partial.idle_count
    return match


def _find_agreed(
    state: PoolState,
    keys: SequenceKeys,
    packed_tokens: bytes,
    start_block: int,
    leaf: Node | None,
) -> Match:
    """Match up to the longest length at which all groups agree (S23)."""
    end_block = (len(packed_tokens) // TOKEN_BYTES - 1) // state.spec.block_size
    match = state.index.match(
        keys, packed_tokens, end_block=end_block, start_block=start_block, leaf=leaf
    )
    end_block = agreed_end(state.windows, match, keys, packed_tokens)
    match = state.index.match(
        keys, packed_tokens, end_block=end_block, start_block=start_block, leaf=leaf
    )
    join_windows(state.windows, match, keys, packed_tokens)
    return match


def _find_partial(
    state: PoolState,
    keys: SequenceKeys,
    packed_tokens: bytes,
    match: Match,
    leaf: Node | None,
    step_id: StepId,
) -> PartialMatch | None:
    """Find the block behind a match with the most leading tokens in common; the oldest of equals.

    A block counts only where an earlier step scheduled it: copies are made before the forward pass;
    and only where every window group has the block too (S23). Costs time in proportion to the
    branches behind the match.
    """
    end_block = match.start_block + match.block_count
    varied_keys = keys.varied_keys.get(end_block, ())
    block_bytes = state.index.block_bytes
    # The last token of a prompt is computed (S7).
    next_tokens = packed_tokens[end_block * block_bytes : len(packed_tokens) - TOKEN_BYTES]
    if not next_tokens:
        return None
    window_place: WindowPlace | None = None
    if state.windows.count:
        window_place = state.windows.index.place_at(keys, packed_tokens, end_block)
    # One token more than the best so far has: few candidates are ever compared token by token.
    wanted = next_tokens[:TOKEN_BYTES]
    best: PartialMatch | None = None
    best_count = 0
    for node, offset in _next_blocks(state, keys, match, leaf):
        begin = offset * block_bytes
        if not node.tokens.startswith(wanted, begin):
            continue
        if node.varied_keys.get(offset, ()) != varied_keys:
            continue
        writing_step_id = _writing_step_id(node.lane, offset)
        if writing_step_id >= step_id:
            continue
        block_tokens = bytes(node.tokens[begin : begin + block_bytes])
        place = window_place and window_place.children.get((block_tokens, varied_keys))
        sources = partial_sources(state.windows, place, step_id=step_id)
        if sources is None:
            continue
        count = common_token_count(next_tokens, block_tokens)
        if count > best_count:
            best_count = count
            wanted = next_tokens[: (count + 1) * TOKEN_BYTES]
            best = PartialMatch(
                node,
                offset,
                count,
                is_published=writing_step_id == EXECUTED
                and not any(map(state.windows.index.is_pending, sources.values())),
                idle_count=sum(
                    block.is_linked and not block.withheld
                    for block in (node.lane, *sources.values())
                ),
                window_sources=sources,
            )
    return best


def _next_blocks(
    state: PoolState, keys: SequenceKeys, match: Match, leaf: Node | None
) -> Iterator[tuple[Node, int]]:
    last = match.path[-1] if match.path else leaf
    if match.path and match.last_count < match.path[-1].block_count:
        yield match.path[-1], match.last_count
        return
    parent = state.index.roots.get(keys.root_key) if last is None else last
    if parent is not None:
        for node in parent.children.values():
            yield node, 0


def _writing_step_id(lane: Lane, offset: int) -> StepId:
    """Return the step that writes a block."""
    if offset < lane.published_count:
        return EXECUTED
    return next(run.step_id for run in lane.pending if offset < run.end)


def common_token_count(first: bytes, second: bytes) -> int:
    """Count the leading tokens that two packed lists have in common."""
    end = min(len(first), len(second))
    if first[:end] == second[:end]:
        return end // TOKEN_BYTES
    ours = np.frombuffer(first[:end], dtype=np.uint32)
    return int(np.argmax(ours != np.frombuffer(second[:end], dtype=np.uint32)))
