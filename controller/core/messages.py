"""Values that go into the core and come out of it.

The RPC layer converts protobuf messages to these and back; the core knows nothing else. All of
them are immutable: a step can be kept and sent again.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

from prefixd.controller.core.hints import NO_HINT, RetentionHint

BlockId = NewType("BlockId", int)
Handle = NewType("Handle", int)
SequenceId = NewType("SequenceId", str)
StepId = NewType("StepId", int)
BlockHash = NewType("BlockHash", bytes)

EVICTION_POLICY_DEFAULT = "lru"
"""The policy of a pool where neither its driver nor the controller's options name one."""

TokenArray = npt.NDArray[np.uint32]
"""Token ids, one dimension."""
IntArray = npt.NDArray[np.int64]
"""Counts, positions, handles or block ids, one dimension."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter as part of the identity; `version` is empty for the default weights."""

    name: str
    path: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An item whose placeholders are the tokens [offset, offset + token_count)."""

    identifier: str
    offset: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything beside the tokens that a driver says about a sequence's KV.

    `prompt_embeds_digests[i]` is the 32-byte digest of leading full block i.
    `has_unknown_fields`: the message carried fields this controller does not know, so the sequence
    is uncacheable (S5).
    """

    lora: LoraAdapter | None = None
    multimodal_items: tuple[MultimodalItem, ...] = ()
    cache_salt: str = ""
    prompt_embeds_digests: tuple[bytes, ...] = ()
    has_unknown_fields: bool = False


class GroupKind(Enum):
    """Kind of a KV group."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    STATE_SPACE = "state_space"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A KV group: layers that share one block table."""

    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_token_count: int = 0
    layer_count: int = 0


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a driver registers.

    `sub_block_reuse`: a match may end inside a block, whose matched tokens are copied.
    `merge_duplicates`: written twins of published blocks are given up, and tables repointed.
    `eviction_policy`: empty where the controller's default is meant.
    """

    pool_name: str
    block_count: int
    block_size: int = 16
    model_name: str = ""
    model_version: str = ""
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    kv_format: str = ""
    vocabulary_size: int = 0
    caching_disabled: bool = False
    sub_block_reuse: bool = False
    merge_duplicates: bool = False
    lease_ms: int | None = None
    worker_address: str = ""
    eviction_policy: str = EVICTION_POLICY_DEFAULT


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """Begins a sequence. `token_ids` is never modified."""

    handle: Handle
    sequence_id: SequenceId
    token_ids: TokenArray
    identity: Identity = Identity()
    schedule_token_count_max: int | None = None
    lookahead_slot_count: int = 0
    must_fit_token_count: int = 0
    preemption_count: int = 0
    skip_cache_read: bool = False
    await_token_count_min: int = 0
    retention_hint: RetentionHint = NO_HINT


@dataclass(frozen=True, slots=True)
class ExtendEntry:
    """Adds known tokens to a sequence and schedules positions of it."""

    handle: Handle
    known_count_before: int
    scheduled_count_before: int
    token_ids: TokenArray
    schedule_token_count_max: int | None = None
    lookahead_slot_count: int = 0
    rollback_to_token_count: int | None = None
    draft_token_count: int = 0


@dataclass(frozen=True, slots=True)
class ForkEntry:
    """Makes a child that shares its parent's blocks."""

    parent_handle: Handle
    child_handle: Handle
    child_sequence_id: SequenceId
    token_count: int


class CloseReason(Enum):
    """Why a sequence was closed."""

    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class CloseEntry:
    """Ends a sequence. `retention_hint`: None where the open's still holds."""

    handle: Handle
    reason: CloseReason
    retention_hint: RetentionHint | None = None


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    """Schedules one position of each of many sequences, column by column.

    All columns but `token_ids` have one length. Row i supplies `token_counts[i]` tokens.
    """

    handles: IntArray
    scheduled_count_before: IntArray
    known_count_before: IntArray
    token_counts: IntArray
    token_ids: TokenArray


Entry = OpenEntry | ExtendEntry | ForkEntry | CloseEntry | DecodeEntry


@dataclass(frozen=True, slots=True)
class FailedSteps:
    """The steps [first, last] were not executed."""

    first_step_id: StepId
    last_step_id: StepId


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered, ordered batch of changes to a pool."""

    step_id: StepId
    executed_step_id: StepId
    entries: tuple[Entry, ...] = ()
    failed: FailedSteps | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The half-open range [start_token, end_token) of positions."""

    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """Runs of consecutive slots: run i is [first_slots[i], first_slots[i] + slot_counts[i])."""

    first_slots: IntArray
    slot_counts: IntArray


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Blocks appended to one group's table from `start_block` on, and the slots to write."""

    start_block: int
    block_ids: IntArray
    slots: SlotRuns


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `token_count` tokens of the source block to the target block.

    From this step on the target stands at `block_index` of the sequence's table.
    """

    handle: Handle
    group_index: int
    source_block_id: BlockId
    target_block_id: BlockId
    token_count: int
    block_index: int


@dataclass(frozen=True, slots=True)
class BlockRemap:
    """A table entry that names another block with equal content from this step on."""

    handle: Handle
    group_index: int
    block_index: int
    old_block_id: BlockId
    new_block_id: BlockId


@dataclass(frozen=True, slots=True)
class FreedBlock:
    """A block that left a table because its group's window has passed it.

    The table names block 0 at `block_index` from this step on.
    """

    handle: Handle
    group_index: int
    block_index: int
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What a worker executes for one sequence in one step.

    `cached` are the positions that this entry matched: [0, matched) for an open; for an extend it
    is empty, unless a failed step had cut the sequence. It ends where `scheduled` begins.
    """

    handle: Handle
    cached: TokenRange
    scheduled: TokenRange
    groups: tuple[GroupPlan, ...]
    copies: tuple[BlockCopy, ...] = ()
    freed_blocks: tuple[FreedBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenOutcome:
    """A sequence was opened."""

    plan: SequencePlan
    published_token_count: int
    pending_token_count: int


@dataclass(frozen=True, slots=True)
class ExtendOutcome:
    """A sequence was extended."""

    plan: SequencePlan


@dataclass(frozen=True, slots=True)
class ForkOutcome:
    """A child was made."""

    plan: SequencePlan


@dataclass(frozen=True, slots=True)
class CloseOutcome:
    """A sequence was closed."""


@dataclass(frozen=True, slots=True)
class DeferredRow:
    """A decode row that changed nothing; `reason` is the name of an error reason."""

    row: int
    reason: str
    needed_count: int = 0
    available_count: int = 0


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """`new_block_ids[g][i]` is row i's new block in group g, 0 where it needed none."""

    new_block_ids: tuple[IntArray, ...]
    deferred_rows: tuple[DeferredRow, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    freed_blocks: tuple[FreedBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry that changed nothing; `reason` is the name of an error reason."""

    reason: str
    message: str
    numbers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AwaitPrefix:
    """The open should wait for the sequence `handle`, which is computing its prefix."""

    published_token_count: int
    pending_token_count: int
    awaitable_token_count: int
    handle: Handle


Outcome = (
    OpenOutcome | ExtendOutcome | ForkOutcome | CloseOutcome | DecodeOutcome | Refusal | AwaitPrefix
)


@dataclass(frozen=True, slots=True)
class CutSequence:
    """A sequence that lost unwritten positions because a step failed."""

    handle: Handle
    known_count: int
    scheduled_count: int


@dataclass(frozen=True, slots=True)
class StepReply:
    """Answers an applied step: one outcome per entry, in order.

    `remaps` hold before the step's entries do, so none of its plans reads a replaced block.
    """

    step_id: StepId
    outcomes: tuple[Outcome, ...]
    cut_sequences: tuple[CutSequence, ...] = ()
    available_block_count: int = 0
    remaps: tuple[BlockRemap, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading tokens of a prompt that are in the index."""

    published_token_count: int
    pending_token_count: int
