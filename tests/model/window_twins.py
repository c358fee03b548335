"""Equal blocks of the naive pool's window groups (S15): as in the group of full attention.

Of several twins that may take places at once the one that has been a twin for longest comes first.
"""

from prefixd.controller.core.messages import BlockId, BlockRemap, PoolSpec
from tests.model.sequence import NaiveSequence, Place
from tests.model.windows import NaiveWindows

Key = tuple[int, Place]
"""A group and a place."""


class NaiveWindowTwins(NaiveWindows):
    """A naive pool that lets twins of window blocks take their places.

    `window_twins` are the twins of all window groups, oldest first. Each is a complete block of a
    table; what a fork has of a block that only its parent had complete is none any more.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.window_twins: list[BlockId] = []

    def key_of_window_twin(self, twin: BlockId) -> Key | None:
        """Returns where a twin stands; None where no table has it complete."""
        for sequence in self.sequences.values():
            for group, table in sequence.window_tables.items():
                if twin in table[: sequence.completed]:
                    return (group, sequence.place(table.index(twin)))
        return None

    def window_twins_of(self, key: Key) -> list[BlockId]:
        """Returns the twins of a group's place, oldest first."""
        return [twin for twin in self.window_twins if self.key_of_window_twin(twin) == key]

    def _written_of(self, key: Key) -> list[BlockId]:
        return [
            twin
            for twin in self.window_twins_of(key)
            if twin in self.step_of_block and self.is_written(twin)
        ]

    def _index_window_twin(self, key: Key, twin: BlockId) -> None:
        self.window_index[key] = twin
        self.window_twins.remove(twin)

    # Coming.

    def enter_window(self, key: Key, block: BlockId) -> None:
        """Lets a complete block have its place, or be a twin."""
        other = self.window_index.setdefault(key, block)
        if other == block:
            return
        self.window_twins.append(block)
        if self.is_written(block):
            self._settle_window(key, block)

    def _settle_window(self, key: Key, twin: BlockId) -> None:
        other = self.window_index[key]
        if other in self.free:
            self._index_window_twin(key, twin)
            self.free.remove(other)
            self.free.insert(0, other)
            self.standing.pop(other, None)
            self.leave_window(other)
            del self.step_of_block[other]
        elif not self.is_written(other):
            self._index_window_twin(key, twin)
            self.window_twins.append(other)

    def settle_twins(self) -> None:
        """Lets twins that have just been written take places, in every group."""
        super().settle_twins()
        for twin in list(self.window_twins):
            key = self.key_of_window_twin(twin)
            if key is not None and self.is_written(twin):
                self._settle_window(key, twin)

    # Going.

    def is_cached_still(self, block: BlockId) -> bool:
        """Tells whether a window block that no table has any more stands for a place, after it has
        handed that to a written twin."""
        if block in self.window_twins:
            self.window_twins.remove(block)
        for key, indexed in self.window_index.items():
            if indexed == block:
                written = self._written_of(key)
                if not written:
                    return True
                self._index_window_twin(key, written[0])
                return False
        return False

    def leave_table(self, block: BlockId) -> None:
        """Takes note that a window block has left a table while others still have it."""
        if block in self.window_twins and self.key_of_window_twin(block) is None:
            self.window_twins.remove(block)

    def evict_window(self, key: Key) -> None:
        """Takes a block for new use; its place goes to its oldest twin."""
        twins = self.window_twins_of(key)
        if twins:
            self._index_window_twin(key, twins[0])
            self.drop_behind(key)
        else:
            super().evict_window(key)

    def forget_window(self, key: Key) -> None:
        """Takes a block and its twins out of the index."""
        for twin in self.window_twins_of(key):
            self.window_twins.remove(twin)
        super().forget_window(key)

    def forget_blocks(self, blocks: set[BlockId]) -> None:
        """Takes blocks of any group out of the index, and unwritten twins from among the twins."""
        super().forget_blocks(blocks)
        self.window_twins = [twin for twin in self.window_twins if self.is_written(twin)]

    def set_model_version(self, model_version: str) -> int:
        """Drops the blocks of other versions: what equals them is private now (S4)."""
        if model_version != self.model_version:
            self.window_twins.clear()
        return super().set_model_version(model_version)

    # Merging.

    def merge_window_twins(self) -> tuple[BlockRemap, ...]:
        """Gives up every written twin for the block of its place."""
        remaps: list[BlockRemap] = []
        freed: list[BlockId] = []
        for sequence in (self.sequences[handle] for handle in sorted(self.sequences)):
            for index in range(sequence.completed):
                remaps += self._merge_at(sequence, index, freed)
        for remap in remaps:
            self.leave_table(remap.old_block_id)
        self.free[:0] = freed
        return tuple(remaps)

    def _merge_at(
        self, sequence: NaiveSequence, index: int, freed: list[BlockId]
    ) -> list[BlockRemap]:
        remaps: list[BlockRemap] = []
        for group, table in sequence.window_tables.items():
            own = table[index]
            if own not in self.window_twins or not self.is_written(own):
                continue
            indexed = self.window_index[group, sequence.place(index)]
            table[index] = indexed
            remaps.append(BlockRemap(sequence.handle, group, index, own, indexed))
            if own not in self.reference_counts():
                self.window_twins.remove(own)
                self.leave_window(own)
                del self.step_of_block[own]
                freed.append(own)
        return remaps
