"""A worker's memory, simulated: what each slot holds, and what a pass may read.

The naive model shares its author's ideas of the rules with the core; this shares only the protocol.
It keeps its own tables from replies, runs the steps in order (copies, then writes, then reads) and
demands that every position that a pass reads holds the prefix that its sequence has there.
"""

from collections import deque
from dataclasses import dataclass, field

from prefixd.controller.core.messages import (
    BlockCopy,
    CloseEntry,
    CloseOutcome,
    DecodeEntry,
    DecodeOutcome,
    ExtendEntry,
    ExtendOutcome,
    ForkEntry,
    ForkOutcome,
    FreedBlock,
    Handle,
    OpenEntry,
    OpenOutcome,
    SequencePlan,
    SlotRuns,
    Step,
    StepId,
    StepReply,
)

Content = tuple[int, str, tuple[int, ...]]
"""The KV group, the salt and all tokens up to a position: what its K and V depend on."""


@dataclass
class Written:
    """A sequence as its worker knows it; one table per KV group."""

    salt: str
    token_ids: list[int]
    scheduled: int
    tables: list[list[int]]

    def content(self, group_index: int, position: int) -> Content:
        """Returns what the slot of a position should hold."""
        return (group_index, self.salt, tuple(self.token_ids[: position + 1]))


@dataclass
class Pass:
    """What one step makes a worker do; slots as they were planned."""

    step_id: StepId
    copies: list[BlockCopy] = field(default_factory=list)
    writes: dict[int, Content] = field(default_factory=dict)
    reads: list[tuple[int, Content]] = field(default_factory=list)


class Memory:
    """The slots of one pool. All tokens are known when they are scheduled.

    `windows` has the window of each KV group in tokens, None for full attention.
    """

    def __init__(self, *, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.freed_count = 0
        self.slots: dict[int, Content] = {}
        self.sequences: dict[Handle, Written] = {}
        self.waiting: deque[Pass] = deque()
        self.copied_count = 0
        self.remapped_count = 0

    def take(self, step: Step, reply: StepReply) -> None:
        """Takes a step's reply: runs what it confirms, forgets what failed, queues its pass."""
        while self.waiting and self.waiting[0].step_id <= step.executed_step_id:
            self._run(self.waiting.popleft())
        if step.failed is not None:
            self.waiting.clear()
        for remap in reply.remaps:
            table = self.sequences[remap.handle].tables[remap.group_index]
            assert table[remap.block_index] == remap.old_block_id
            table[remap.block_index] = remap.new_block_id
            self.remapped_count += 1
        for cut in reply.cut_sequences:
            sequence = self.sequences[cut.handle]
            sequence.scheduled = cut.scheduled_count
        if step.failed is not None:
            for sequence in self.sequences.values():
                for table in sequence.tables:
                    del table[sequence.scheduled // self.block_size :]
        planned = Pass(step.step_id)
        for entry, outcome in zip(step.entries, reply.outcomes, strict=True):
            match entry, outcome:
                case OpenEntry(), OpenOutcome():
                    self._open(planned, entry, outcome.plan)
                case ExtendEntry(), ExtendOutcome():
                    sequence = self.sequences[entry.handle]
                    sequence.token_ids += entry.token_ids.tolist()
                    self._follow(planned, entry.handle, outcome.plan)
                case ForkEntry(), ForkOutcome():
                    self._fork(entry, outcome.plan)
                case DecodeEntry(), DecodeOutcome():
                    self._decode(planned, entry, outcome)
                case CloseEntry(), CloseOutcome():
                    del self.sequences[entry.handle]
        self.waiting.append(planned)

    def _open(self, planned: Pass, entry: OpenEntry, plan: SequencePlan) -> None:
        self.sequences[entry.handle] = Written(
            entry.identity.cache_salt,
            entry.token_ids.tolist(),
            scheduled=0,
            tables=[[] for _ in self.windows],
        )
        self._follow(planned, entry.handle, plan)

    def _fork(self, entry: ForkEntry, plan: SequencePlan) -> None:
        parent = self.sequences[entry.parent_handle]
        count = entry.token_count
        tables = [group.block_ids.tolist() for group in plan.groups]
        for table, parent_table in zip(tables, parent.tables, strict=True):
            assert len(table) == -(-count // self.block_size)
            assert all(
                block in (0, other) for block, other in zip(table, parent_table, strict=False)
            )
        self.sequences[entry.child_handle] = Written(
            parent.salt, parent.token_ids[:count], scheduled=count, tables=tables
        )

    def _follow(self, planned: Pass, handle: Handle, plan: SequencePlan) -> None:
        sequence = self.sequences[handle]
        self._free(plan.freed_blocks)
        for table, group in zip(sequence.tables, plan.groups, strict=True):
            assert group.start_block == len(table)
            table.extend(group.block_ids.tolist())
        self._copy(planned, sequence, plan.copies)
        start, end = plan.scheduled.start_token, plan.scheduled.end_token
        self._schedule(planned, sequence, start=start, end=end)
        for group_index, group in enumerate(plan.groups):
            slots = [self._slot(sequence, group_index, position) for position in range(start, end)]
            assert _run_slots(group.slots)[: len(slots)] == slots

    def _free(self, freed: tuple[FreedBlock, ...]) -> None:
        for one in freed:
            table = self.sequences[one.handle].tables[one.group_index]
            assert table[one.block_index] == one.block_id
            table[one.block_index] = 0
            self.freed_count += 1

    def _decode(self, planned: Pass, entry: DecodeEntry, outcome: DecodeOutcome) -> None:
        deferred = {row.row for row in outcome.deferred_rows}
        self._free(outcome.freed_blocks)
        ends = entry.token_counts.cumsum().tolist()
        for row, handle in enumerate(entry.handles.tolist()):
            if row in deferred:
                continue
            sequence = self.sequences[handle]
            count = int(entry.token_counts[row])
            sequence.token_ids += entry.token_ids[ends[row] - count : ends[row]].tolist()
            for table, column in zip(sequence.tables, outcome.new_block_ids, strict=True):
                if column[row]:
                    table.append(int(column[row]))
            copies = tuple(copy for copy in outcome.copies if copy.handle == handle)
            self._copy(planned, sequence, copies)
            position = int(entry.scheduled_count_before[row])
            self._schedule(planned, sequence, start=position, end=position + 1)

    def _copy(self, planned: Pass, sequence: Written, copies: tuple[BlockCopy, ...]) -> None:
        for copy in copies:
            sequence.tables[copy.group_index][copy.block_index] = copy.target_block_id
            planned.copies.append(copy)
            self.copied_count += 1

    def _schedule(self, planned: Pass, sequence: Written, *, start: int, end: int) -> None:
        sequence.scheduled = end
        for group_index, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                slot = self._slot(sequence, group_index, position)
                content = sequence.content(group_index, position)
                if position >= start:
                    was = planned.writes.setdefault(slot, content)
                    assert was == content, "two rows write one slot"
                if end > start:
                    planned.reads.append((slot, content))

    def _slot(self, sequence: Written, group_index: int, position: int) -> int:
        block_index, offset = divmod(position, self.block_size)
        block_id = sequence.tables[group_index][block_index]
        assert block_id, "a window has lost a block too early"
        return block_id * self.block_size + offset

    def _run(self, planned: Pass) -> None:
        sources = {copy.source_block_id for copy in planned.copies}
        assert sources.isdisjoint(copy.target_block_id for copy in planned.copies)
        for copy in planned.copies:
            for offset in range(copy.token_count):
                source = copy.source_block_id * self.block_size + offset
                target = copy.target_block_id * self.block_size + offset
                self.slots[target] = self.slots[source]
        self.slots.update(planned.writes)
        for slot, content in planned.reads:
            assert self.slots.get(slot) == content, (planned.step_id, slot)


def _run_slots(runs: SlotRuns) -> list[int]:
    return [
        slot
        for first, count in zip(runs.first_slots.tolist(), runs.slot_counts.tolist(), strict=True)
        for slot in range(first, first + count)
    ]
