"""Eviction by name on the naive model."""

from prefixd.controller.core.messages import BlockId
from tests.model.policies import NaiveEviction


def evict(pool: NaiveEviction, blocks: set[BlockId]) -> tuple[int, int]:
    """Takes named blocks, or the places of named twins, out of the index with all that is
    behind them (S19); sequences that have some share nothing more. Returns how many were
    dropped, and how many of these are held."""
    named = {place for place, block in pool.index.items() if block in blocks}
    named |= {pool.place_of_twin(twin) for twin in pool.twin_blocks if twin in blocks}
    doomed = [place for place in pool.index if any(place[: len(top)] == top for top in named)]
    doomed_blocks = {pool.index[place] for place in doomed}
    for place in doomed:
        doomed_blocks.update(pool.twins_of(place))
    held = sum(pool.index[place] in pool.reference_counts() for place in doomed)
    for sequence in pool.sequences.values():
        at = [index for index, block in enumerate(sequence.table) if block in doomed_blocks]
        if at:
            sequence.sealed_at = min(sequence.shared_count, at[0])
            sequence.cacheable = False
    for place in sorted(doomed, key=len, reverse=True):
        pool.leave(place)
        del pool.index[place]
    for block in doomed_blocks:
        del pool.step_of_block[block]
    pool.twin_blocks = [twin for twin in pool.twin_blocks if twin not in doomed_blocks]
    return len(doomed), held
