"""One growing token list and what the worker knows of it."""

from dataclasses import dataclass
from enum import Enum

from prefixd.worker.lora import LoraIdentity
from prefixd.worker.retention import RetentionHint
from prefixd.worker.speculation import PromptLookup


class SequencePhase(Enum):
    """Where a sequence stands.

    WAITING: not open at the controller. OPENING: an open was sent, its answer is out. RUNNING: open
    at the controller. ENDED: nothing more is computed for it.
    """

    WAITING = "waiting"
    OPENING = "opening"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer that grows behind it.

    Invariants: ``handle``, the counts and ``tables`` describe the controller's state as of the
    last answered step and are meaningful while RUNNING; ``known_count <= len(token_ids)``;
    positions scheduled behind the known tokens are drafts, which count for nothing until they are
    known.

    Attributes:
        sequence_id: its name for people, unique among the worker's live sequences.
        token_ids: prompt and generated tokens.
        prompt_token_count: how many of them are the prompt.
        cache_salt: separates tenants; empty: none.
        lora: the adapter that all its tokens go through; None: none.
        skip_cache_read: match nothing, yet publish.
        retention_hint: what the client knows about later use of the blocks; None: nothing.
        wants_prompt_logits: whether the logits of all prompt positions are read.
        lookup: guesses tokens ahead; None: nobody does.
        arrival: rank among all sequences of this worker; the earlier is served first.
        phase: where it stands.
        handle: its number in this epoch, new with each open.
        known_count: tokens that the controller knows.
        scheduled_count: positions that the controller has scheduled.
        tables: its block table of each KV group; block 0 where a window group holds nothing; none
            at all before it is open.
        is_cut: a step that scheduled it failed; its next entry is an extend.
        was_opened: whether it has ever been opened, in any epoch.
        preemption_count: how often it gave up its blocks.
        await_count: opens in a row that were told to await their prefix.
        shortage_count: entries in a row that found no block although nothing else ran.
    """

    sequence_id: str
    token_ids: list[int]
    prompt_token_count: int
    arrival: int
    cache_salt: str = ""
    lora: LoraIdentity | None = None
    skip_cache_read: bool = False
    retention_hint: RetentionHint | None = None
    wants_prompt_logits: bool = False
    lookup: PromptLookup | None = None
    phase: SequencePhase = SequencePhase.WAITING
    handle: int = 0
    known_count: int = 0
    scheduled_count: int = 0
    tables: tuple[list[int], ...] = ()
    is_cut: bool = False
    was_opened: bool = False
    preemption_count: int = 0
    await_count: int = 0
    shortage_count: int = 0

    @property
    def token_count(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def held_block_count(self) -> int:
        """Blocks that its tables name, over all KV groups."""
        return sum(block_id != 0 for table in self.tables for block_id in table)

    @property
    def rollback_to_token_count(self) -> int | None:
        """Position of the first rejected draft that is still scheduled; None: there is none."""
        if self.scheduled_count <= self.known_count:
            return None
        # The newest token stands where a draft was wrong, or behind the last one.
        confirmed_count = len(self.token_ids) - 1
        return confirmed_count if confirmed_count < self.scheduled_count else None

    @property
    def unscheduled_token_count(self) -> int:
        """Tokens whose KV nobody computes yet."""
        rollback = self.rollback_to_token_count
        return len(self.token_ids) - (self.scheduled_count if rollback is None else rollback)

    @property
    def is_decoding(self) -> bool:
        """Whether just its newest token is left to schedule and to tell the controller."""
        return (
            not self.is_cut
            and self.scheduled_count == self.known_count
            and self.unscheduled_token_count == 1
        )

    def forget_controller_state(self) -> None:
        """Back to WAITING: the sequence is closed at the controller, or its epoch is over."""
        self.phase = SequencePhase.WAITING
        self.handle = 0
        self.known_count = 0
        self.scheduled_count = 0
        self.tables = ()
        self.is_cut = False
        self.await_count = 0
