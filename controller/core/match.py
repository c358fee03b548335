"""What a search of the index found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixd.controller.core.node import Node
from prefixd.controller.core.window_blocks import WindowBlock


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """The first `token_count` tokens of a node's block, which follow a match.

    `window_sources` maps each window group to its block of the same place; `idle_count` counts the
    blocks to copy from that could be handed out instead.
    """

    node: Node
    offset: int
    token_count: int
    is_published: bool
    idle_count: int
    window_sources: Mapping[int, WindowBlock]


@dataclass(slots=True)
class Match:
    """The longest run of indexed blocks behind a table of `start_block` blocks.

    `last_count` blocks of the last node match; `published_count` counts the leading written blocks,
    `idle_count` those that could be handed out instead: nobody holds them or withholds them (S22).
    The blocks of a partial match count there too. `window_blocks` maps each window group to the
    matched blocks of its last window, by table index.
    """

    start_block: int
    path: list[Node] = field(default_factory=list)
    last_count: int = 0
    block_count: int = 0
    published_count: int = 0
    idle_count: int = 0
    partial: PartialMatch | None = None
    window_blocks: dict[int, dict[int, WindowBlock]] = field(default_factory=dict)

    def token_count(self, block_size: int) -> int:
        """Count the matched tokens."""
        partial_count = 0 if self.partial is None else self.partial.token_count
        return self.block_count * block_size + partial_count

    def published_token_count(self, block_size: int) -> int:
        """Count the leading matched tokens that are written."""
        is_whole = self.published_count == self.block_count
        if is_whole and self.partial is not None and self.partial.is_published:
            return self.token_count(block_size)
        return self.published_count * block_size
