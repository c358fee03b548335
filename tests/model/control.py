"""What befalls a naive pool as a whole: failed steps, flushes, other weights."""

from prefixd.controller.core.errors import BlocksInUse
from prefixd.controller.core.messages import BlockId, Handle
from tests.model.naive import NaivePool
from tests.model.sequence import NaiveSequence


class NaiveControl(NaivePool):
    """A naive pool whose steps may fail, and whose content may be dropped."""

    def cut_tables(self) -> dict[Handle, int]:
        """Takes back what the unexecuted steps scheduled: unwritten blocks leave the index, and
        every table is cut to its leading run of published blocks. Returns the scheduled counts
        of before, of the sequences that lost something."""
        unwritten = set(self.pending())
        self.forget_blocks(unwritten)
        idle = [block for block in self.free if block in unwritten]
        self.free = idle + [block for block in self.free if block not in unwritten]
        for block in [other for other in self.step_of_block if not self.is_written(other)]:
            del self.step_of_block[block]
        before: dict[Handle, int] = {}
        for sequence in self.sequences.values():
            run = self.written_run(sequence)
            if sequence.scheduled > run * sequence.block_size:
                before[sequence.handle] = sequence.scheduled
                sequence.cut = True
            sequence.completed = min(sequence.completed, run)
            if not sequence.cacheable:
                sequence.sealed_at = run
            del sequence.scheduled_by[run * sequence.block_size :]
            self.release(sequence, kept_block_count=run)
        return before

    def forget_blocks(self, blocks: set[BlockId]) -> None:
        """Takes blocks out of the index."""
        self.index = {place: block for place, block in self.index.items() if block not in blocks}

    def written_run(self, sequence: NaiveSequence) -> int:
        """Counts the leading blocks that a failure leaves a table, unwritten ones being unknown."""
        run = 0
        while run < sequence.shared_count and sequence.table[run] in self.step_of_block:
            run += 1
        return run

    # Control.

    def flush(self) -> int:
        """Empties the index; the free order keeps its positions (S13, S21).

        A step that schedules nothing leaves a worker nothing to do, so it needs no confirmation:
        otherwise the very step that confirms the last work would keep the pool from being flushed.
        """
        held = len(self.reference_counts())
        unconfirmed = sum(step_id > self.settled_step_id for step_id in self.working_step_ids)
        if held or unconfirmed:
            raise BlocksInUse(
                "in use", numbers={"held_block_count": held, "unconfirmed_step_count": unconfirmed}
            )
        dropped = len(self.index)
        self.index.clear()
        self.step_of_block.clear()
        return dropped

    def set_model_version(self, model_version: str) -> int:
        """Drops the idle blocks of other versions; open sequences share nothing more (S4)."""
        if model_version == self.model_version:
            return 0
        self.model_version = model_version
        dropped = sum(block in self.free for block in self.index.values())
        self.index.clear()
        self.step_of_block.clear()
        self.twin_blocks.clear()
        for sequence in self.sequences.values():
            sequence.cacheable = False
            sequence.sealed_at = 0
        return dropped
