"""The naive pool's copies on write."""

from prefixd.controller.core.messages import BlockId
from tests.model.naive import NaivePool, Refused
from tests.model.sequence import NaiveSequence


class NaiveForks(NaivePool):
    """A naive pool whose sequences may share partial blocks (S16)."""

    def shared_tail(self, sequence: NaiveSequence, position: int) -> BlockId | None:
        """Returns the block that a write at a position must not go into, because other tables have
        it or the index, or because a sequence that left it is still read in this step (S16)."""
        index = position // sequence.block_size
        if index >= len(sequence.table):
            return None
        block = sequence.table[index]
        is_shared = self.reference_counts()[block] > 1 or self.place_of_block(block) is not None
        return block if is_shared or block in self.left_blocks else None

    def check_copy(self, sequence: NaiveSequence, block: BlockId, position: int) -> None:
        """Refuses a copy of what this step computes or copies itself (S16)."""
        start = position // sequence.block_size * sequence.block_size
        steps = sequence.scheduled_by[start:position]
        if block in self.target_blocks or self.applied_step_id in steps:
            raise Refused("COPY_IN_SAME_STEP")

    def replace_shared(self, sequence: NaiveSequence, block: BlockId) -> BlockId:
        """Puts a new block into a table in place of a shared one; returns it."""
        (own,) = self.take(1)
        self.busy_blocks.update((block, own))
        self.target_blocks.add(own)
        if sequence.planned_step_id == self.applied_step_id:
            self.left_blocks.add(block)
        sequence.table[sequence.table.index(block)] = own
        self.free[:0] = self.let_go(block)
        return own
