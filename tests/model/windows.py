"""The naive pool's groups behind the first: a table of each sequence for each, an index by place.

They follow the first group, position by position (S23): a window block is made, completed
and copied with the one of full attention, but it may be missing where no window reaches any more.
Choices that the rules leave open, and that the core has made:

- What a window has passed is freed by the next entry that goes on, before it takes new blocks; a
  refused entry frees nothing. It goes by the smaller of the known count before the entry and the
  position at which it goes on, since drafts may be rolled back to there.
- Blocks are taken group by group, copies before new blocks; they are released and freed group by
  group, too. Of freed blocks the last one has been used last.
- A prompt is admitted by what its full-attention groups will need in all, and by what the window
  groups need for the chunk at hand: later chunks use again what the windows leave behind.
- A further group of full attention is one with a window that spans everything; besides, a block of
  it goes with all that is cached behind it (S19).
"""

from collections.abc import Callable
from functools import partial

from prefixd.controller.core.hints import RetentionHint
from prefixd.controller.core.messages import (
    BlockId,
    CloseReason,
    FreedBlock,
    GroupKind,
    Identity,
    PoolSpec,
)
from tests.model.naive import Matched
from tests.model.policies import NaiveClaim, NaiveEviction
from tests.model.sequence import NaiveSequence, Place


class NaiveWindows(NaiveEviction):
    """A naive pool with several groups.

    `windows` has the tokens of each group's window; a query sees itself and those before it.
    `further_groups` are those of full attention.
    `window_index` maps a place of a group to the one block that stands for it. `window_claims` has
    what is claimed of a window block (S20): it stands alone, so its band is that of its claim.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.further_groups = {
            group
            for group, one in enumerate(spec.groups)
            if group and one.kind is GroupKind.FULL_ATTENTION
        }
        self.windows = {
            group: 2**40 if group in self.further_groups else one.window_token_count
            for group, one in enumerate(spec.groups)
            if group
        }
        self.window_index: dict[tuple[int, Place], BlockId] = {}
        self.window_claims: dict[BlockId, NaiveClaim] = {}

    # What can be seen.

    def reference_counts(self) -> dict[BlockId, int]:
        """Counts, for every held block, the tables it stands in."""
        counts = super().reference_counts()
        for sequence in self.sequences.values():
            for table in sequence.window_tables.values():
                for block in filter(None, table):
                    counts[block] = counts.get(block, 0) + 1
        return counts

    def indexed(self) -> dict[BlockId, tuple[int, Place]]:
        """Returns the blocks of the index of all groups, each with its group and place."""
        blocks = {block: (0, place) for place, block in self.index.items()}
        return blocks | {block: key for key, block in self.window_index.items()}

    def published(self) -> dict[BlockId, Place]:
        """Returns the written part of the index of all groups."""
        return {block: key[1] for block, key in self.indexed().items() if self.is_written(block)}

    def pending(self) -> dict[BlockId, Place]:
        """Returns the unwritten part of the index of all groups."""
        return {
            block: key[1] for block, key in self.indexed().items() if not self.is_written(block)
        }

    def blocks_at(self, place: Place) -> dict[int, BlockId]:
        """Returns the blocks that stand for a place, by group."""
        windows = {
            group: self.window_index[group, place]
            for group in self.windows
            if (group, place) in self.window_index
        }
        return {0: self.index[place]} | windows

    def is_indexed(self, block: BlockId) -> bool:
        """Tells whether a block of any group stands for a place."""
        return block in self.index.values() or block in self.window_index.values()

    # Windows.

    def first_needed(self, group: int, position: int) -> int:
        """Returns the first block that a query at a position attends to."""
        return max(position - self.windows[group] + 1, 0) // self.spec.block_size

    def needed(self, group: int, block_count: int) -> range:
        """Returns the blocks that the first query behind so many blocks attends to."""
        first = self.first_needed(group, block_count * self.spec.block_size)
        return range(min(first, block_count), block_count)

    def window_span(self, *, start: int, end_block: int) -> int:
        """Counts the window blocks that a sequence needs from a position on up to a block."""
        return sum(
            max(end_block - self.first_needed(group, start), 0)
            for group in self.windows
            if group not in self.further_groups
        )

    def matched_blocks(
        self, token_ids: list[int], identity: Identity, *, own_count: int = 0
    ) -> Matched:
        """Returns the longest match of all groups: each window group has the blocks of its last
        window. The first `own_count` blocks are in a table already."""
        full = super().matched_blocks(token_ids, identity)
        for length in range(len(full), 0, -1):
            matched = full[:length]
            for group in self.windows:
                for index in self.needed(group, length):
                    place = self.place_in(token_ids, identity, index)
                    if index >= own_count and (group, place) in self.window_index:
                        matched[index] = {
                            **matched[index],
                            group: self.window_index[group, place],
                        }
            if all(
                index < own_count or group in matched[index]
                for group in self.windows
                for index in self.needed(group, length)
            ):
                return matched
        return []

    def left_behind(self, sequence: NaiveSequence, position: int) -> list[FreedBlock]:
        """Lists what no query from a position on attends to; changes nothing."""
        return [
            FreedBlock(sequence.handle, group, index, block)
            for group, table in sequence.window_tables.items()
            for index, block in enumerate(table[: self.first_needed(group, position)])
            if block
        ]

    def gain_count(self, freed: list[FreedBlock]) -> int:
        """Counts those of the blocks left behind that the step at hand may hand out again."""
        counts = self.reference_counts()
        return sum(
            counts[one.block_id] == 1 and one.block_id not in self.busy_blocks for one in freed
        )

    def free_behind(self, sequence: NaiveSequence, freed: list[FreedBlock]) -> None:
        """Takes blocks that were left behind out of the tables."""
        for one in freed:
            sequence.window_tables[one.group_index][one.block_index] = BlockId(0)
        self.let_go_windows([one.block_id for one in freed])

    def let_go_windows(self, blocks: list[BlockId]) -> None:
        """Takes back window blocks that have left a table: cached ones go behind those that went
        before, the others to the front of the free order together."""
        uncached: list[BlockId] = []
        for block in blocks:
            if block in self.reference_counts():
                self.leave_table(block)
            elif self.is_cached_still(block):
                self.rest(block)
            else:
                self.step_of_block.pop(block, None)
                self.leave_window(block)
                uncached.append(block)
        self.free[:0] = uncached

    def is_cached_still(self, block: BlockId) -> bool:
        """Tells whether a window block that no table has any more stands for a place."""
        return block in self.window_index.values()

    def leave_table(self, block: BlockId) -> None:
        """Takes note that a window block has left a table while others still have it."""

    def has_window(self, sequence: NaiveSequence, token_count: int) -> bool:
        """Tells whether tables hold what a query behind so many tokens attends to."""
        end = -(-token_count // self.spec.block_size)
        return all(
            all(table[self.first_needed(group, token_count) : end])
            for group, table in sequence.window_tables.items()
        )

    def share_windows(self, parent: NaiveSequence, child: NaiveSequence) -> None:
        """Gives a fork the parent's blocks of the windows that it begins with (S16)."""
        end = len(child.table)
        for group, table in parent.window_tables.items():
            first = min(self.first_needed(group, child.scheduled), end)
            child.window_tables[group] = [BlockId(0)] * first + table[first:end]

    # Claims.

    def close(self, sequence: NaiveSequence, hint: RetentionHint, reason: CloseReason) -> None:
        """Lets a sequence claim its blocks in every group."""
        super().close(sequence, hint, reason)
        for table in sequence.window_tables.values() if self.has_bands else ():
            for block in filter(None, table):
                self._stand_at_window(block, self.claim(hint, reason))

    def use(self, matched: Matched) -> None:
        """Takes matched blocks of all groups out of the free order."""
        super().use(matched)
        for blocks in matched:
            for block in list(blocks.values())[1:]:
                self.answer(self.window_claims, block)

    def rest(self, block: BlockId) -> None:
        """Puts an idle block of any group at the end of its band."""
        if not self.has_bands or block not in self.window_index.values():
            super().rest(block)
            return
        if block not in self.window_claims:
            self._stand_at_window(block, NaiveClaim(self.unclaimed))
        self.put(block, self.window_claims[block].band)

    def standing_claims(self) -> list[tuple[NaiveClaim, Callable[[], None]]]:
        """Returns the claims of all groups, each with what is to be done once it has changed."""
        windows = [
            (claim, partial(self._move_window, block))
            for block, claim in self.window_claims.items()
        ]
        return [*super().standing_claims(), *windows]

    def leave_window(self, block: BlockId) -> None:
        """Forgets what is claimed of a block that is no longer cached."""
        self.window_claims.pop(block, None)

    def _stand_at_window(self, block: BlockId, claim: NaiveClaim) -> None:
        self.number(claim)
        other = self.window_claims.get(block, claim)
        self.window_claims[block] = max(other, claim, key=NaiveClaim.strength)

    def _move_window(self, block: BlockId) -> None:
        band = self.window_claims[block].band
        if block in self.free and self.standing[block] != band:
            self.put(block, band)

    # What the full-attention group does, for the window groups.

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks from the front of the free order; cached ones are evicted now (S13)."""
        taken = super().take(count)
        for block in taken:
            key = next((key for key, other in self.window_index.items() if other == block), None)
            if key is not None:
                self.statistics.evicted_block_count += 1
                self.leave_window(block)
                self.evict_window(key)
                del self.step_of_block[block]
        return taken

    def evict_window(self, key: tuple[int, Place]) -> None:
        """Takes the block of a group's place for new use."""
        del self.window_index[key]
        self.drop_behind(key)

    def drop_behind(self, key: tuple[int, Place]) -> None:
        """Drops what a further group of full attention has behind an evicted block (S19); what
        sequences have goes with the block that they are writing at its place."""
        group, place = key
        held = self.reference_counts()
        for other in self.window_keys_behind(group, place) if group in self.further_groups else ():
            if self.window_index[other] not in held or key not in self.window_index:
                self.forget_window(other)

    def window_keys_behind(self, group: int, place: Place) -> list[tuple[int, Place]]:
        """Lists the places from one on that a group has blocks of."""
        return [
            (other, behind)
            for other, behind in self.window_index
            if other == group and behind[: len(place)] == place
        ]

    def forget_window(self, key: tuple[int, Place]) -> None:
        """Takes a block out of the index; a held one stays in its tables."""
        block = self.window_index.pop(key)
        self.leave_window(block)
        if block not in self.reference_counts():
            del self.step_of_block[block]

    def complete_blocks(self, sequence: NaiveSequence) -> None:
        """Lets blocks of all groups enter the index."""
        first = sequence.completed
        super().complete_blocks(sequence)
        size = sequence.block_size
        if not sequence.cacheable:
            return
        for index in range(first, sequence.completed):
            for group, table in sequence.window_tables.items():
                block, key = table[index], (group, sequence.place(index))
                if not block or self.window_index.get(key) == block:
                    continue
                steps = sequence.scheduled_by[index * size : (index + 1) * size]
                self.step_of_block[block] = max(steps)
                self.enter_window(key, block)

    def enter_window(self, key: tuple[int, Place], block: BlockId) -> None:
        """Lets a complete block have its place."""
        self.window_index.setdefault(key, block)

    def release(self, sequence: NaiveSequence, *, kept_block_count: int) -> None:
        """Gives back the blocks of all groups behind the kept ones, from the end."""
        super().release(sequence, kept_block_count=kept_block_count)
        for table in sequence.window_tables.values():
            left = [block for block in reversed(table[kept_block_count:]) if block]
            del table[kept_block_count:]
            self.let_go_windows(left)

    # Control.

    def forget_blocks(self, blocks: set[BlockId]) -> None:
        """Takes blocks of any group out of the index."""
        super().forget_blocks(blocks)
        for key, block in list(self.window_index.items()):
            if block in blocks:
                self.leave_window(block)
                del self.window_index[key]

    def written_run(self, sequence: NaiveSequence) -> int:
        """Counts the leading blocks that a failure leaves a table: as many as its windows allow."""
        for length in range(super().written_run(sequence), 0, -1):
            if all(
                table[index] in self.step_of_block
                for group, table in sequence.window_tables.items()
                for index in self.needed(group, length)
            ):
                return length
        return 0

    def flush(self) -> int:
        """Empties the index of all groups (S21)."""
        dropped = super().flush() + len(self.window_index)
        self.window_index.clear()
        self.window_claims.clear()
        return dropped

    def set_model_version(self, model_version: str) -> int:
        """Drops the idle blocks of other versions in all groups (S4)."""
        if model_version == self.model_version:
            return 0
        dropped = sum(block in self.free for block in self.window_index.values())
        self.window_index.clear()
        self.window_claims.clear()
        return dropped + super().set_model_version(model_version)
