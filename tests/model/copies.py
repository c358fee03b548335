"""The naive pool's copies: on write, and of partial matches."""

from collections.abc import Iterable, Sequence

from prefixd.controller.core.messages import (
    BlockCopy,
    BlockId,
    BlockRemap,
    Handle,
    Identity,
    PrefixMatch,
)
from tests.model.digests import extra_keys
from tests.model.naive import Matched, Refused
from tests.model.sequence import NaiveSequence
from tests.model.window_twins import NaiveWindowTwins

Partial = tuple[dict[int, BlockId], int]
"""The blocks at a place, by group, and how many of its tokens match."""


class NaiveCopies(NaiveWindowTwins):
    """A naive pool whose sequences may share partial blocks (S16), and match inside blocks."""

    def partial(
        self, token_ids: list[int], identity: Identity, matched: Matched, *, step_id: int
    ) -> Partial | None:
        """Returns the blocks of the place that has most of the tokens behind a match in front, the
        oldest of equals, and how many. An earlier step scheduled them, in every group."""
        if not self.spec.sub_block_reuse or not self.may_match(identity):
            return None
        index = len(matched)
        size = self.spec.block_size
        wanted = token_ids[index * size : len(token_ids) - 1]
        front = self.place_in(token_ids, identity, index - 1) if index else ()
        keys = self._keys(identity, index)
        best: Partial | None = None
        for place in self.index:
            if len(place) != index + 1 or place[:index] != front or place[index][1] != keys:
                continue
            sources = self.blocks_at(place)
            is_ready = all(self.step_of_block[block] < step_id for block in sources.values())
            count = common_count(wanted, place[index][0])
            if len(sources) <= len(self.windows) or not is_ready:
                continue
            if count > (best[1] if best else 0):
                best = (sources, count)
        return best

    def _keys(self, identity: Identity, index: int) -> object:
        return extra_keys(
            identity,
            block_index=index,
            block_size=self.spec.block_size,
            model_version=self.model_version,
        )

    def match_prefix(self, token_ids: Iterable[int], identity: Identity) -> PrefixMatch:
        """Tells how much of a prompt is cached. Changes nothing (S8)."""
        known = [int(token) for token in token_ids]
        matched = self.matched_blocks(known, identity)
        partial = self.partial(known, identity, matched, step_id=self.applied_step_id + 1)
        return self.match_with(matched, partial)

    def match_with(self, matched: Matched, partial: Partial | None) -> PrefixMatch:
        """Splits matched tokens into written and pending ones."""
        whole = self.match_of(matched)
        if partial is None:
            return whole
        sources, count = partial
        if not whole.pending_token_count and all(map(self.is_written, sources.values())):
            return PrefixMatch(whole.published_token_count + count, 0)
        return PrefixMatch(whole.published_token_count, whole.pending_token_count + count)

    def delay_behind_later_blocks(self) -> None:
        """Lets no block be written before the one that its place stands on, whichever twin of that
        is written first: an earlier twin may have gone with its sequence."""
        for place in sorted(self.index, key=len):
            above = self.index.get(place[:-1])
            if above is None or self.is_written(above):
                continue
            twins = [above, *self.twins_of(place[:-1])]
            step_id = min(self.step_of_block[twin] for twin in twins)
            block = self.index[place]
            self.step_of_block[block] = max(self.step_of_block[block], step_id)

    def merge_twins(self) -> tuple[BlockRemap, ...]:
        """Gives up every written copy for the written block of its place, table by table."""
        remaps: list[BlockRemap] = []
        freed: list[BlockId] = []
        for handle in sorted(self.sequences):
            sequence = self.sequences[handle]
            for index in range(sequence.shared_count):
                own = sequence.table[index]
                indexed = self.index[sequence.place(index)]
                if own != indexed and self.is_written(own):
                    assert self.is_written(indexed)
                    sequence.table[index] = indexed
                    freed += self.let_go(own)
                    remaps.append(BlockRemap(handle, 0, index, own, indexed))
        self.free[:0] = freed
        return (*remaps, *self.merge_window_twins())

    def keep_source(self, block: BlockId) -> None:
        """Keeps the source of a copy from being handed out; an idle one is used last now."""
        self.busy_blocks.add(block)
        if block in self.free:
            self.rest(block)

    def copy_partial(
        self, sequence: NaiveSequence, partial: Partial, *, index: int
    ) -> tuple[BlockCopy, ...]:
        """Returns the copies of a partial match into new blocks that stand in the tables now."""
        sources, count = partial
        copies: list[BlockCopy] = []
        for group, (table, source) in enumerate(
            zip(sequence.tables(), sources.values(), strict=True)
        ):
            self.target_blocks.add(table[index])
            copies.append(BlockCopy(sequence.handle, group, source, table[index], count, index))
        return tuple(copies)

    def awaitable(
        self, token_ids: list[int], identity: Identity, *, matched_token_count: int
    ) -> tuple[int, Handle] | None:
        """Finds the open sequence whose known full blocks will provide most further matching
        tokens (S10): their count and its handle."""
        best: tuple[int, Handle] | None = None
        for sequence in self.sequences.values():
            is_planned = sequence.planned_step_id == self.applied_step_id
            will_provide = sequence.scheduled < sequence.known or (
                self.spec.sub_block_reuse and is_planned
            )
            if not sequence.cacheable or not will_provide:
                continue
            size = self.spec.block_size
            common = common_count(
                token_ids[:-1], sequence.token_ids[: sequence.known // size * size]
            )
            for index in range(-(-common // size)):
                if self._keys(sequence.identity, index) != self._keys(identity, index):
                    common = min(common, index * size)
            if not self.spec.sub_block_reuse:
                common -= common % size
            further = common - matched_token_count
            if further > 0 and (best is None or further > best[0]):
                best = (further, sequence.handle)
        return best

    def shared_tails(self, sequence: NaiveSequence, position: int) -> list[BlockId]:
        """Returns the blocks, one per group, that a write at a position must not go into: other
        tables have one of them or the index has, or a sequence that left it is still read in this
        step (S16). What needs a copy in one group gets one in all."""
        index = position // sequence.block_size
        if index >= len(sequence.table):
            return []
        blocks = [table[index] for table in sequence.tables()]
        counts = self.reference_counts()
        is_shared = any(
            counts[block] > 1 or self.is_indexed(block) or block in self.left_blocks
            for block in blocks
        )
        return blocks if is_shared else []

    def check_copy(self, sequence: NaiveSequence, blocks: list[BlockId], position: int) -> None:
        """Refuses a copy of what this step computes or copies itself (S16)."""
        start = position // sequence.block_size * sequence.block_size
        steps = sequence.scheduled_by[start:position]
        if not self.target_blocks.isdisjoint(blocks) or self.applied_step_id in steps:
            raise Refused("COPY_IN_SAME_STEP")

    def copy_tails(
        self, sequence: NaiveSequence, blocks: list[BlockId], position: int
    ) -> tuple[BlockCopy, ...]:
        """Puts new blocks into the tables in place of shared ones, group by group."""
        index, token_count = divmod(position, sequence.block_size)
        copies: list[BlockCopy] = []
        for group, (table, block) in enumerate(zip(sequence.tables(), blocks, strict=True)):
            (own,) = self.take(1)
            self.busy_blocks.update((block, own))
            self.target_blocks.add(own)
            if sequence.planned_step_id == self.applied_step_id:
                self.left_blocks.add(block)
            table[index] = own
            if group == 0:
                self.free[:0] = self.let_go(block)
                self.busy_blocks.update(self.outlive(sequence, block))
            else:
                self.let_go_windows([block])
            copies.append(BlockCopy(sequence.handle, group, block, own, token_count, index))
        return tuple(copies)


def common_count(first: list[int], second: Sequence[int]) -> int:
    """Counts the leading tokens that two lists have in common."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count
