"""The naive pool's equal blocks of window groups (S15 in each group of S23)."""

from collections.abc import Iterator

from prefixd.controller.core.messages import BlockId, BlockRemap, Handle, PoolSpec
from tests.model.sequence import NaiveSequence
from tests.model.windows import Key, NaiveWindows


class NaiveWindowTwins(NaiveWindows):
    """A naive pool that keeps the blocks of its window groups that equal indexed ones.

    `window_twins` has the twins of a place, oldest first; each is a full block of a table. As with
    full attention, a written twin takes the place of an idle or unwritten block, and the last
    holder of an indexed block hands the place to a written twin. No block of these groups stands
    behind another, so no twin refreshes anything.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.window_twins: dict[Key, list[BlockId]] = {}

    def twins_at(self, key: Key) -> list[BlockId]:
        """Returns the twins of a place, oldest first."""
        return self.window_twins.setdefault(key, [])

    def full_blocks(self, sequence: NaiveSequence) -> Iterator[tuple[Key, int, BlockId]]:
        """Gives the window blocks of a table that stand for places, with place and table index."""
        for index in range(sequence.shared_count):
            for group, table in sequence.window_tables.items():
                if table[index]:
                    yield (group, sequence.place(index)), index, table[index]

    def enter_window(self, key: Key, block: BlockId, *, step_id: int) -> None:
        """Lets a full block have its place, or become a twin."""
        super().enter_window(key, block, step_id=step_id)
        if self.window_index[key] != block:
            self.twins_at(key).append(block)
            self._settle(key, block)

    def settle_twins(self) -> None:
        """Lets twins of all groups that have just been written take places, the oldest first."""
        super().settle_twins()
        ages = list(self.step_of_block)
        twins = [(twin, key) for key, twins in self.window_twins.items() for twin in twins]
        for twin, key in sorted(twins, key=lambda one: ages.index(one[0])):
            if self.step_of_block[twin] == self.executed_step_id:
                self._settle(key, twin)

    def _settle(self, key: Key, twin: BlockId) -> None:
        other = self.window_index[key]
        is_idle = other in self.free
        if not self.is_written(twin) or (self.is_written(other) and not is_idle):
            return
        self._hand_over(key, twin)
        if is_idle:
            del self.step_of_block[other]
            self.leave_window(other)
            self.standing.pop(other, None)
            self.free.remove(other)
            self.free.insert(0, other)
        else:
            self.twins_at(key).append(other)

    def _hand_over(self, key: Key, twin: BlockId) -> None:
        self.twins_at(key).remove(twin)
        self.window_index[key] = twin

    def stays_cached(self, block: BlockId) -> bool:
        """Tells whether a block keeps its place, now that no table has it."""
        for key, other in self.window_index.items():
            if other == block:
                written = [twin for twin in self.twins_at(key) if self.is_written(twin)]
                if written:
                    self._hand_over(key, written[0])
                return not written
        return False

    def let_go_windows(self, blocks: list[BlockId]) -> None:
        """Takes back window blocks; what no table has as a full block is no twin any more."""
        full = {
            block
            for sequence in self.sequences.values()
            for _, _, block in self.full_blocks(sequence)
        }
        for twins in self.window_twins.values():
            twins[:] = [twin for twin in twins if twin in full or twin not in blocks]
        super().let_go_windows(blocks)

    def evict_window(self, key: Key) -> None:
        """Gives up a place's block; the oldest twin, which is still unwritten, gets the place."""
        twins = self.twins_at(key)
        if twins:
            self._hand_over(key, twins[0])
        else:
            super().evict_window(key)

    def cut_tables(self) -> dict[Handle, int]:
        """Takes back what the unexecuted steps scheduled."""
        for twins in self.window_twins.values():
            twins[:] = [twin for twin in twins if self.is_written(twin)]
        return super().cut_tables()

    def set_model_version(self, model_version: str) -> int:
        """Forgets the twins of other versions."""
        if model_version != self.model_version:
            self.window_twins.clear()
        return super().set_model_version(model_version)

    def merge_window_twins(self) -> tuple[BlockRemap, ...]:
        """Gives up every written twin for the indexed block of its place, table by table."""
        remaps: list[BlockRemap] = []
        merged: list[BlockId] = []
        for handle in sorted(self.sequences):
            sequence = self.sequences[handle]
            for key, index, own in list(self.full_blocks(sequence)):
                if own in self.twins_at(key) and self.is_written(own):
                    indexed = self.window_index[key]
                    assert self.is_written(indexed)
                    sequence.window_tables[key[0]][index] = indexed
                    remaps.append(BlockRemap(handle, key[0], index, own, indexed))
                    merged.append(own)
        self.let_go_windows(list(dict.fromkeys(merged)))
        return tuple(remaps)
