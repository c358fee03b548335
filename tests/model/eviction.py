"""Eviction by name on the naive model."""

from collections.abc import Set

from prefixd.controller.core.messages import BlockId
from tests.model.sequence import Place
from tests.model.window_twins import NaiveWindowTwins


def evict(
    pool: NaiveWindowTwins, blocks: set[BlockId], digested: Set[Place] = frozenset()
) -> tuple[int, int]:
    """Takes named blocks, the places of named twins, or what is published at places named by
    their digests, out of the index with all that is behind them (S19), in every group; a named
    block of a sliding window goes alone. Sequences that have some share nothing more. Returns how
    many were dropped, and how many of these are held."""
    blocks = blocks | {block for block, place in pool.published().items() if place in digested}
    named = {place for place, block in pool.index.items() if block in blocks}
    named |= {pool.place_of_twin(twin) for twin in pool.twin_blocks if twin in blocks}
    further = {key for key in pool.window_index if _names(pool, key, blocks)}
    further = {key for key in further if key[0] in pool.further_groups}
    named |= {place for _, place in further if place in pool.index}
    doomed = [place for place in pool.index if _is_behind(place, named)]
    windows = {
        key: block
        for key, block in pool.window_index.items()
        if _names(pool, key, blocks)
        or _is_behind(key[1], named)
        or _is_behind(key[1], {place for group, place in further if group == key[0]})
    }
    window_twins = {twin for key in windows for twin in pool.window_twins_of(key)}
    counts = pool.reference_counts()
    held = sum(pool.index[place] in counts for place in doomed)
    held += sum(block in counts for block in windows.values())
    doomed_blocks = {pool.index[place] for place in doomed}
    for place in doomed:
        doomed_blocks.update(pool.twins_of(place))
    for sequence in pool.sequences.values():
        at = [index for index, block in enumerate(sequence.table) if block in doomed_blocks]
        if at or not {*windows.values(), *window_twins}.isdisjoint(sequence.held_blocks()):
            sequence.sealed_at = min([sequence.shared_count, *at])
            sequence.cacheable = False
    for place in sorted(doomed, key=len, reverse=True):
        pool.leave(place)
        del pool.index[place]
    for key, block in windows.items():
        pool.leave_window(block)
        del pool.window_index[key]
    # A failure leaves a held window block in its table if it was written.
    for block in doomed_blocks | (set(windows.values()) - counts.keys()):
        del pool.step_of_block[block]
    pool.window_twins = [twin for twin in pool.window_twins if twin not in window_twins]
    pool.twin_blocks = [twin for twin in pool.twin_blocks if twin not in doomed_blocks]
    return len(doomed) + len(windows), held


def _names(pool: NaiveWindowTwins, key: tuple[int, Place], blocks: set[BlockId]) -> bool:
    """Tells whether a window block, or a twin of it, is among blocks."""
    return not blocks.isdisjoint((pool.window_index[key], *pool.window_twins_of(key)))


def _is_behind(place: Place, tops: set[Place]) -> bool:
    return any(place[: len(top)] == top for top in tops)
