"""A pool written down from the rules with plain lists and dicts, one block at a time.

It is slow on purpose: a block's place in the index is the whole content in front of it, the free
order is a list, and whatever can be counted is counted again each time it is asked for.
The full-attention group, which comes first, is all that is known here;
`tests.model.windows` adds the groups behind it and `tests.model.steps` the log of steps.
"""

from prefixd.controller.core.messages import (
    BlockId,
    Handle,
    Identity,
    PoolSpec,
    PrefixMatch,
)
from tests.model.digests import block_digest
from tests.model.sequence import NaiveSequence, Place, place_of
from tests.model.statistics import NaiveStatistics

Matched = list[dict[int, BlockId]]
"""What each matched place has: the block of every KV group that needs one there, by its index."""


class Refused(Exception):
    """An entry or a row is refused; nothing has changed."""

    def __init__(self, reason: str, **numbers: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.numbers = numbers


class NaivePool:
    """Blocks, index, free order and open sequences.

    `index` maps a place to the one block that stands for it. `step_of_block` says which step writes
    a complete block: one of the index or a twin; a block of the index is published once that step
    has been executed. `twin_blocks` are the twins, oldest first. `working_step_ids` are the steps
    that scheduled or copied something. `busy_blocks` are read, written or copied by the step that
    is being applied; of these, `left_blocks` were read by a sequence that the step closed or that
    copied them, `target_blocks` are copied into.

    Two blocks with one place are twins (S15). The index never moves from a written block to one
    that is not, nor from a pending one to a later one: the later step may fail, and would
    take away what was cached. So a twin stays private until it is written; then it takes the
    place of an idle or pending block. An evicted block leaves its place to a twin in any case.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.model_version = spec.model_version
        self.free: list[BlockId] = [BlockId(block) for block in range(1, spec.block_count)]
        self.sequences: dict[Handle, NaiveSequence] = {}
        self.index: dict[Place, BlockId] = {}
        self.step_of_block: dict[BlockId, int] = {}
        self.twin_blocks: list[BlockId] = []
        self.applied_step_id = 0
        self.executed_step_id = 0
        self.settled_step_id = 0
        self.working_step_ids: set[int] = set()
        self.statistics = NaiveStatistics()
        self.busy_blocks: set[BlockId] = set()
        self.left_blocks: set[BlockId] = set()
        self.target_blocks: set[BlockId] = set()

    # What can be seen.

    def reference_counts(self) -> dict[BlockId, int]:
        """Counts, for every held block, the tables it stands in."""
        counts: dict[BlockId, int] = {}
        for sequence in self.sequences.values():
            for block in sequence.table:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def is_written(self, block: BlockId) -> bool:
        """Tells whether the step that writes this complete block has been executed."""
        return self.step_of_block[block] <= self.executed_step_id

    def written_count(self, sequence: NaiveSequence) -> int:
        """Counts a sequence's leading positions whose step has been executed."""
        written = 0
        while written < sequence.scheduled:
            if sequence.scheduled_by[written] > self.executed_step_id:
                break
            written += 1
        return written

    def published(self) -> dict[BlockId, Place]:
        """Returns the written part of the index."""
        return {block: place for place, block in self.index.items() if self.is_written(block)}

    def pending(self) -> dict[BlockId, Place]:
        """Returns the unwritten part of the index."""
        return {block: place for place, block in self.index.items() if not self.is_written(block)}

    def place_of_block(self, block: BlockId) -> Place | None:
        """Returns the place that the block stands for; None where it is not in the index."""
        return next((place for place, other in self.index.items() if other == block), None)

    def digest_of(self, place: Place, *, algorithm: str, root: bytes) -> bytes:
        """Computes the chained digest of a place from its content."""
        digest = root
        for token_ids, keys in place:
            digest = block_digest(algorithm, parent=digest, token_ids=token_ids, extra_keys=keys)
        return digest

    # Matching.

    def matched_blocks(self, token_ids: list[int], identity: Identity) -> Matched:
        """Returns the longest run of indexed blocks from block 0 (S6), the last token excepted
        (S7)."""
        if not self.may_match(identity):
            return []
        matched: Matched = []
        for index in range((len(token_ids) - 1) // self.spec.block_size):
            place = self.place_in(token_ids, identity, index)
            if place not in self.index:
                break
            matched.append({0: self.index[place]})
        return matched

    def may_match(self, identity: Identity) -> bool:
        """Tells whether sequences of an identity are cached at all."""
        return not (self.spec.caching_disabled or identity.has_unknown_fields)

    def place_in(self, token_ids: list[int], identity: Identity, index: int) -> Place:
        """Returns the place of a block of such a sequence."""
        return place_of(
            token_ids,
            identity,
            index=index,
            block_size=self.spec.block_size,
            version=self.model_version,
        )

    def match_of(self, matched: Matched) -> PrefixMatch:
        """Splits matched places into the written ones in front and the others, in tokens."""
        written = 0
        while written < len(matched) and all(map(self.is_written, matched[written].values())):
            written += 1
        return PrefixMatch(
            published_token_count=written * self.spec.block_size,
            pending_token_count=(len(matched) - written) * self.spec.block_size,
        )

    # Allocation.

    def available(self) -> list[BlockId]:
        """Returns what may be handed out now, in order: blocks of this step excepted (S22)."""
        return [block for block in self.free if block not in self.busy_blocks]

    def check_supply(
        self, *, new_block_count: int, total_block_count: int, kept: set[BlockId], gain_count: int
    ) -> None:
        """Refuses what the pool can never, or not now, give (S11); idle blocks that are to be
        kept, because they are matched, count against the supply (S12), and what the entry frees
        itself counts for it."""
        usable = self.spec.block_count - 1
        if total_block_count > usable:
            raise Refused(
                "SEQUENCE_EXCEEDS_POOL", needed_count=total_block_count, available_count=usable
            )
        needed_count = new_block_count + sum(block in kept for block in self.available())
        available_count = len(self.available()) + gain_count
        if needed_count > available_count:
            raise Refused(
                "POOL_EXHAUSTED", needed_count=needed_count, available_count=available_count
            )

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks from the front of the free order; cached ones are evicted now (S13)."""
        taken = self.available()[:count]
        for block in taken:
            self.free.remove(block)
            place = self.place_of_block(block)
            if place is not None:
                self.statistics.evicted_block_count += 1
                self._evict(place)
        return taken

    def _evict(self, place: Place) -> None:
        twins = self.twins_of(place)
        if twins:
            del self.step_of_block[self.index[place]]
            self._index_twin(place, self.oldest(twins))
        else:
            self.drop(place)

    def drop(self, place: Place) -> None:
        """Takes a place out of the index; nothing may be left below it (S19)."""
        del self.step_of_block[self.index.pop(place)]
        deeper = [other for other in self.index if other[: len(place)] == place]
        assert not deeper, "a cached block would be reachable only through an evicted one"

    # Completion and release.

    def complete_blocks(self, sequence: NaiveSequence) -> None:
        """Lets blocks enter the index whose tokens are known and whose positions are scheduled."""
        size = sequence.block_size
        while (sequence.completed + 1) * size <= min(sequence.known, sequence.scheduled):
            index = sequence.completed
            sequence.completed += 1
            if sequence.cacheable:
                own = sequence.table[index]
                if own not in self.step_of_block:
                    self.step_of_block[own] = max(
                        sequence.scheduled_by[index * size : (index + 1) * size]
                    )
                self._enter(sequence.place(index), own)

    def _enter(self, place: Place, own: BlockId) -> None:
        other = self.index.setdefault(place, own)
        if other == own:
            return
        if own not in self.twin_blocks:
            self.twin_blocks.append(own)
        if not self.is_written(own):
            return
        if other in self.free:
            self._index_twin(place, own)
            self.free.remove(other)
            self.free.insert(0, other)
            del self.step_of_block[other]
        elif not self.is_written(other):
            self._index_twin(place, own)
            self.twin_blocks.append(other)

    def _index_twin(self, place: Place, twin: BlockId) -> None:
        self.index[place] = twin
        self.twin_blocks.remove(twin)

    def twins_of(self, place: Place) -> list[BlockId]:
        """Returns the twins of a place (S15), in the order their sequences opened."""
        depth = len(place) - 1
        return [
            sequence.table[depth]
            for sequence in self.sequences.values()
            if depth < sequence.shared_count
            and depth < len(sequence.table)
            and sequence.place(depth) == place
            and sequence.table[depth] != self.index[place]
        ]

    def rest(self, block: BlockId) -> None:
        """Puts a cached block that became idle, or was refreshed, where it goes in the free order:
        all that an eviction policy decides (S20)."""
        if block in self.free:
            self.free.remove(block)
        self.free.append(block)

    def release(self, sequence: NaiveSequence, *, kept_block_count: int) -> None:
        """Gives back a table's blocks behind the kept ones, from the end (S17).

        An idle block whose twin stood in the table is refreshed as if it had stood there itself:
        otherwise it could be evicted before the blocks that follow it (S19). For the same reason it
        is not handed out in a step that reads the twin.
        """
        uncached: list[BlockId] = []
        while len(sequence.table) > kept_block_count:
            block = sequence.table.pop()
            self._refresh_twin(sequence, block)
            uncached += self.let_go(block)
            self.outlive(sequence, block)
        self.free[:0] = uncached

    def outlive(self, sequence: NaiveSequence, block: BlockId) -> list[BlockId]:
        """Moves the idle twins of a table behind a block of the index that became idle, which is
        behind them in the tree (S19); returns them."""
        moved: list[BlockId] = []
        if block not in self.free or self.place_of_block(block) is None:
            return moved
        for depth in reversed(range(min(sequence.shared_count, len(sequence.table)))):
            indexed = self.index[sequence.place(depth)]
            if indexed != sequence.table[depth] and indexed in self.free:
                self.rest(indexed)
                moved.append(indexed)
        return moved

    def let_go(self, block: BlockId) -> list[BlockId]:
        """Takes back a block that has left a table; returns it where it is uncached now."""
        if block in self.reference_counts():
            if block in self.twin_blocks and not self._is_complete_for_any(block):
                self.twin_blocks.remove(block)
                self.step_of_block.pop(block, None)
            return []
        place = self.place_of_block(block)
        written = self.written_twins_of(place) if place is not None else []
        if place is not None and written:
            self._index_twin(place, self.oldest(written))
        if place is not None and not written:
            self.rest(block)
            return []
        self.step_of_block.pop(block, None)
        if block in self.twin_blocks:
            self.twin_blocks.remove(block)
        return [block]

    def _is_complete_for_any(self, block: BlockId) -> bool:
        return any(
            block in sequence.table[: sequence.completed] for sequence in self.sequences.values()
        )

    def _refresh_twin(self, sequence: NaiveSequence, block: BlockId) -> None:
        depth = len(sequence.table)
        if depth >= sequence.shared_count:
            return
        indexed = self.index.get(sequence.place(depth), block)
        if sequence.planned_step_id == self.applied_step_id:
            self.busy_blocks.add(indexed)
        if indexed != block and indexed in self.free:
            self.rest(indexed)

    def written_twins_of(self, place: Place) -> list[BlockId]:
        """Returns the twins of a place whose KV is written.

        While tables are cut, those that never will be have no step any more.
        """
        return [
            twin
            for twin in self.twins_of(place)
            if twin in self.step_of_block and self.is_written(twin)
        ]

    def oldest(self, twins: list[BlockId]) -> BlockId:
        """Chooses the twin that has been one for longest."""
        return min(twins, key=self.twin_blocks.index)

    def settle_twins(self) -> None:
        """Lets twins that have just been written take the places of idle and pending twins, the
        oldest first."""
        for twin in list(self.twin_blocks):
            place = self.place_of_twin(twin)
            written = self.written_twins_of(place)
            if written:
                self._enter(place, self.oldest(written))

    def place_of_twin(self, twin: BlockId) -> Place:
        """Returns the place that a twin stands at."""
        sequence = next(
            one for one in self.sequences.values() if twin in one.table[: one.completed]
        )
        return sequence.place(sequence.table.index(twin))
