"""Finding the sequence whose prefix an open should wait for (rule S10)."""

from prefixd.controller.core.identity import SequenceKeys
from prefixd.controller.core.match import Match
from prefixd.controller.core.matching import common_token_count
from prefixd.controller.core.messages import AwaitPrefix, StepId
from prefixd.controller.core.sequences import TOKEN_BYTES, Sequence
from prefixd.controller.core.state import PoolState


def find_awaited(
    state: PoolState, keys: SequenceKeys, packed_tokens: bytes, match: Match, *, step_id: StepId
) -> AwaitPrefix | None:
    """Find the sequence whose known full blocks will provide the most further matching tokens.

    It is prefilling still; or, where a match may end inside a block, the step that is being applied
    computes what only later steps may copy.
    """
    block_size = state.spec.block_size
    matched_count = match.token_count(block_size)
    best_count = matched_count
    best: Sequence | None = None
    columns = state.columns
    for sequence in state.sequences.values():
        row = sequence.row
        will_provide = columns.scheduled[row] < columns.known[row] or (
            state.spec.sub_block_reuse and columns.planned_step_id[row] == step_id
        )
        if not will_provide or sequence.uncacheable or sequence.keys.root_key != keys.root_key:
            continue
        count = _common_count(state, sequence, keys, packed_tokens)
        if count > best_count:
            best_count = count
            best = sequence
    if best is None:
        return None
    published_count = match.published_token_count(block_size)
    return AwaitPrefix(
        published_token_count=published_count,
        pending_token_count=matched_count - published_count,
        awaitable_token_count=best_count - matched_count,
        handle=best.handle,
    )


def _common_count(
    state: PoolState, sequence: Sequence, keys: SequenceKeys, packed_tokens: bytes
) -> int:
    """Count the tokens that a prompt could match in a sequence's full blocks, were they indexed."""
    block_size = state.spec.block_size
    prompt = packed_tokens[: len(packed_tokens) - TOKEN_BYTES]
    count = common_token_count(prompt, bytes(sequence.full_tokens[: len(prompt)]))
    if not state.spec.sub_block_reuse:
        count -= count % block_size
    if keys.varied_keys or sequence.keys.varied_keys:
        for block_index in range(-(-count // block_size)):
            if sequence.varied_keys(block_index) != keys.varied_keys.get(block_index, ()):
                return block_index * block_size
    return count
