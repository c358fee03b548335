"""Matching in the KV groups behind the first (rules S8, S23)."""

from __future__ import annotations

from prefixd.controller.core.identity import SequenceKeys
from prefixd.controller.core.match import Match
from prefixd.controller.core.messages import StepId
from prefixd.controller.core.window_blocks import WindowBlock, WindowPlace
from prefixd.controller.core.windows import WindowGroups


def agreed_end(
    windows: WindowGroups, match: Match, keys: SequenceKeys, packed_tokens: bytes
) -> int:
    """Return the longest length in blocks, up to a match's, at which all groups agree.

    Blocks before the match's start stand in the sequence's tables, those behind it must be in the
    index. Changes nothing (S8).
    """
    end = match.start_block + match.block_count
    places = list(windows.index.places(keys, packed_tokens, end))

    def has(group_index: int, at: int) -> bool:
        return at < len(places) and group_index in places[at].blocks

    return windows.agreed_length(has, start=match.start_block, end=end)


def join_windows(
    windows: WindowGroups, match: Match, keys: SequenceKeys, packed_tokens: bytes
) -> None:
    """Add the window blocks to a match that all groups agree on."""
    end = match.start_block + match.block_count
    places = list(windows.index.places(keys, packed_tokens, end))
    for group_index in windows.sizes:
        first = windows.first_needed(group_index, position=end * windows.block_size)
        blocks = {
            at: places[at].blocks[group_index] for at in range(max(first, match.start_block), end)
        }
        match.window_blocks[group_index] = blocks
        for at, block in blocks.items():
            match.idle_count += block.is_linked and not block.withheld
            if block in windows.index.pending:
                match.published_count = min(match.published_count, at - match.start_block)


def partial_sources(
    windows: WindowGroups, place: WindowPlace | None, *, step_id: StepId
) -> dict[int, WindowBlock] | None:
    """Find the block of every group at a place that a match ends inside.

    Each was scheduled before `step_id`, which copies from it. None where one is missing: a block
    that is cached later has all its tokens, those of a window of 1 included, whose queries see none
    of them.
    """
    sources: dict[int, WindowBlock] = {}
    for group_index in windows.sizes:
        block = None if place is None else place.blocks.get(group_index)
        if block is None or (block in windows.index.pending and block.step_id >= step_id):
            return None
        sources[group_index] = block
    return sources
