"""What the engine asks of the controller in one step, and what it is answered: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from prefixd.worker.sequence import Sequence


class CloseReason(Enum):
    """Why a sequence is closed."""

    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Close:
    """Ends a sequence at the controller."""

    handle: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Schedules the position of a sequence's newest token, which it supplies."""

    sequence: Sequence
    handle: int
    position: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Schedules the next chunk of an open sequence; supplies the tokens not yet known.

    Attributes:
        draft_token_ids: guesses for the positions behind the known tokens.
        rollback_to_token_count: first lets the scheduled count fall to this: rejected drafts.
    """

    sequence: Sequence
    handle: int
    known_count_before: int
    scheduled_count_before: int
    token_ids: tuple[int, ...]
    schedule_token_count_max: int
    draft_token_ids: tuple[int, ...] = ()
    rollback_to_token_count: int | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Begins a sequence with all tokens it has, and schedules the first chunk behind its match."""

    sequence: Sequence
    handle: int
    token_ids: tuple[int, ...]
    schedule_token_count_max: int
    must_fit_token_count: int
    await_token_count_min: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Begins a sequence that shares the blocks of another one's first tokens."""

    sequence: Sequence
    handle: int
    parent_handle: int
    token_count: int


@dataclass(frozen=True, slots=True)
class StepDraft:
    """The entries of one step, in the order in which they are sent.

    Forks come first: a parent may be closed by the same step, and a child decode its own token.
    """

    forks: tuple[Fork, ...] = ()
    closes: tuple[Close, ...] = ()
    decode_rows: tuple[DecodeRow, ...] = ()
    extends: tuple[Extend, ...] = ()
    opens: tuple[Open, ...] = ()
    token_budget: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no entry stands in it."""
        return not (self.forks or self.closes or self.decode_rows or self.extends or self.opens)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences that it forks, opens, extends or decodes."""
        return (
            *(fork.sequence for fork in self.forks),
            *(row.sequence for row in self.decode_rows),
            *(extend.sequence for extend in self.extends),
            *(entry.sequence for entry in self.opens),
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first ``token_count`` slots of a block to another before the forward pass.

    The target then stands at ``block_index`` of a group's table of the sequence with the handle.
    """

    source_block_id: int
    target_block_id: int
    token_count: int
    handle: int = 0
    block_index: int = 0
    group_index: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """A block that a window left behind; the sequence's table names block 0 in its place."""

    handle: int
    group_index: int
    block_index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One KV group's part of a plan.

    Attributes:
        start_block: index in the block table of the first appended block.
        block_ids: the appended blocks; block 0 in places that a window group need not hold.
        slots: one per scheduled position.
    """

    start_block: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to execute for one opened or extended sequence.

    Attributes:
        cached_end: positions below are in the pool already, or written before this plan reads them.
        scheduled_start, scheduled_end: the positions to compute.
        groups: one part per KV group.
        copies: copies to make first.
        freed: blocks that were freed before any was appended.
    """

    handle: int
    cached_end: int
    scheduled_start: int
    scheduled_end: int
    groups: tuple[GroupPlan, ...]
    copies: tuple[Copy, ...] = ()
    freed: tuple[Freed, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence was opened; so many of its leading tokens are reused."""

    plan: Plan
    cached_token_count: int


@dataclass(frozen=True, slots=True)
class Extended:
    """A sequence was extended."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Forked:
    """A sequence began with another one's blocks: a table per KV group."""

    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry changed nothing; ``reason`` is the name of an error reason."""

    reason: str
    message: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The open changed nothing: another sequence is still computing its prefix."""

    awaitable_token_count: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decode rows' answer.

    Attributes:
        new_block_ids: a column per KV group, of one block per row; 0 where it needed none.
        deferred: reason by row index; such a row changed nothing.
        copies: copies to make first.
        freed: blocks that were freed before any was appended.
    """

    new_block_ids: tuple[tuple[int, ...], ...] = ()
    deferred: Mapping[int, str] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()
    freed: tuple[Freed, ...] = ()


@dataclass(frozen=True, slots=True)
class Remap:
    """A table entry that names another block with equal content from this step on."""

    handle: int
    block_index: int
    old_block_id: int
    new_block_id: int
    group_index: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence that lost unwritten positions because a step failed."""

    handle: int
    known_count: int
    scheduled_count: int


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The controller's answer to a draft; outcomes stand in the order of the draft's entries."""

    step_id: int
    decoded: Decoded = Decoded()
    extends: tuple[Extended | Refused, ...] = ()
    opens: tuple[Opened | Awaiting | Refused, ...] = ()
    cuts: tuple[Cut, ...] = ()
    available_block_count: int = 0
    forks: tuple[Forked | Refused, ...] = ()
    remaps: tuple[Remap, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Consecutive positions of one sequence that the forward pass computes.

    Attributes:
        token_ids: those of the positions, drafts last.
        tables: the sequence's whole block table of each KV group at this step.
        slots: one per position, for each KV group.
        logit_token_count: of how many of the last positions the logits are wanted.
        draft_token_count: how many of the last tokens are guesses.
    """

    sequence: Sequence
    start_position: int
    token_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    logit_token_count: int
    draft_token_count: int = 0

    @property
    def end_position(self) -> int:
        """First position behind the chunk."""
        return self.start_position + len(self.token_ids)

    @property
    def wants_logits(self) -> bool:
        """Whether anything is read behind its positions."""
        return self.logit_token_count > 0


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The work of one step: copies first, then all chunks in one forward pass."""

    chunks: tuple[PlannedChunk, ...] = ()
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """A sequence that the controller will not run; ``reason`` is an error reason's name."""

    sequence: Sequence
    reason: str
    message: str
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Applied:
    """What an answered step leads to.

    Attributes:
        opened: sequences opened for the first time, with the number of their reused tokens.
    """

    pass_plan: PassPlan
    opened: tuple[tuple[Sequence, int], ...] = ()
    rejections: tuple[Rejection, ...] = ()
