"""What the controller's calls return: frozen values without protobuf.

The command line prints these with `--json`, so a field's name is a documented key.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Generic, TypeVar

RowT = TypeVar("RowT")


class BlockState(StrEnum):
    """Whether a block is free, cached only, or in a sequence's table."""

    FREE = "free"
    EVICTABLE = "evictable"
    HELD = "held"
    UNKNOWN = "unknown"


class BlockContent(StrEnum):
    """Whether a block's content can be matched."""

    PRIVATE = "private"
    PENDING = "pending"
    PUBLISHED = "published"
    UNKNOWN = "unknown"


class KvGroupKind(StrEnum):
    """The kind of a KV group."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    STATE_SPACE = "state_space"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A controller."""

    version: str
    hash_algorithm: str
    root_hash_hex: str
    start_time: datetime
    pool_count: int
    limits: dict[str, int]
    hash_algorithms: tuple[str, ...]
    eviction_policy: str
    eviction_policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table; `window_token_count` is 0 without a window."""

    kind: KvGroupKind
    window_token_count: int
    layer_count: int


@dataclass(frozen=True, slots=True)
class AgeHistogram:
    """Blocks by age: count i is of blocks younger than `upper_bounds_ms[i]`, the last unbounded."""

    upper_bounds_ms: tuple[int, ...]
    block_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counters of a pool since registration; sequences count when they are opened."""

    sequence_count: int
    query_token_count: int
    hit_token_count: int
    preempted_sequence_count: int
    preempted_query_token_count: int
    preempted_hit_token_count: int
    recent_hit_rate: float
    evicted_block_count: int
    recomputed_token_count: int
    usage: float
    age_at_eviction: AgeHistogram
    age_at_hit: AgeHistogram


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool and its accounts. `lease_left_ms` is None while a session is open."""

    pool_name: str
    model_name: str
    model_version: str
    epoch: int
    revision: int
    block_count: int
    block_size: int
    free_block_count: int
    evictable_block_count: int
    held_block_count: int
    published_block_count: int
    pending_block_count: int
    sequence_count: int
    applied_step_id: int
    executed_step_id: int
    groups: tuple[KvGroup, ...]
    statistics: PoolStatistics
    session_active: bool
    draining: bool
    caching_disabled: bool
    lease_ms: int
    lease_left_ms: int | None
    kv_format: str
    worker_address: str
    vocabulary_size: int
    eviction_policy: str


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter as part of an identity."""

    name: str
    path: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image or another item whose placeholder tokens stand in a sequence."""

    identifier: str
    offset: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything beside tokens that changes KV; digests are hexadecimal."""

    lora: LoraAdapter | None = None
    multimodal_items: tuple[MultimodalItem, ...] = ()
    cache_salt: str = ""
    prompt_embeds_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence:
    """An open sequence and its positions, in tokens."""

    sequence_id: str
    handle: int
    known_count: int
    scheduled_count: int
    written_count: int
    cached_count: int
    block_count: int
    identity: Identity
    preemption_count: int
    uncacheable: bool
    recomputed_token_count: int
    model_version: str
    cut: bool


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The block table of one KV group: block i holds the tokens from i * block_size on."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """A sequence with its block tables, at one revision of the pool."""

    sequence: Sequence
    tables: tuple[BlockTable, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block; digests are empty unless it is in the index."""

    block_id: int
    state: BlockState
    content: BlockContent
    holder_count: int
    hash_hex: str
    parent_hash_hex: str
    block_index: int
    group_index: int


@dataclass(frozen=True, slots=True)
class BlockHolders:
    """A block and the sequences whose tables it stands in, at one revision of the pool."""

    block: Block
    sequence_ids: tuple[str, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class FreeOrder:
    """Free and evictable blocks in the order in which they would be handed out."""

    block_ids: tuple[int, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading tokens of a prompt whose KV is written, and those that a running step writes."""

    published_token_count: int
    pending_token_count: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """A pool was emptied of this many cached blocks."""

    dropped_block_count: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Cached blocks that were dropped by name, those behind them included; some are still held."""

    dropped_block_count: int
    held_block_count: int
    revision: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A pool's invariants were checked, and hold."""

    epoch: int
    revision: int
    invariants: tuple[str, ...]
    block_count: int
    cached_block_count: int
    digest_count: int
    sequence_count: int


@dataclass(frozen=True, slots=True)
class Published:
    """Digests of published blocks, to be brought up to date by the events behind `revision`."""

    epoch: int
    revision: int
    hashes_hex: frozenset[str]


@dataclass(frozen=True, slots=True)
class Page(Generic[RowT]):
    """Rows of a listing; an empty `next_page_token` is the end.

    `revision` is the pool's position in the event log of `epoch`, None where the listing has none.
    """

    rows: tuple[RowT, ...]
    next_page_token: str
    revision: int | None = field(default=None)
    epoch: int | None = field(default=None)
