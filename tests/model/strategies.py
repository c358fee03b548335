"""What hypothesis draws for the entries of a step: few tokens, short prompts, many collisions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prefixd.controller.core.hints import NO_HINT, Continuation, RetentionHint
from prefixd.controller.core.messages import (
    ExtendEntry,
    ForkEntry,
    GroupKind,
    GroupSpec,
    Handle,
    Identity,
    LoraAdapter,
    MultimodalItem,
    OpenEntry,
    PoolSpec,
    SequenceId,
)
from prefixd.controller.core.policies.registry import EVICTION_POLICIES
from tests.model.sequence import NaiveSequence

Value = TypeVar("Value")

IDENTITIES = (
    Identity(cache_salt="tenant-a"),
    Identity(cache_salt="tenant-b"),
    Identity(lora=LoraAdapter("poet", "/adapters/poet")),
    Identity(lora=LoraAdapter("poet", "/adapters/poet", "v2"), cache_salt="tenant-a"),
    Identity(multimodal_items=(MultimodalItem("cat", 1, 3),)),
    Identity(multimodal_items=(MultimodalItem("cat", 1, 3), MultimodalItem("dog", 5, 2))),
    Identity(multimodal_items=(MultimodalItem("dog", 2, 4),)),
    Identity(prompt_embeds_digests=(bytes(range(32)),)),
    Identity(has_unknown_fields=True),
)
"""Identities beside the plain one."""

VOCABULARY_SIZE = 8
TOKEN_IDS = (0, 0, 1, 1, 2)
"""Tokens of prompts, as often as they are drawn."""


@dataclass(frozen=True, slots=True)
class Opening:
    """An open entry but for its names and the prompt that it shares."""

    prompt: int
    shared_token_count: int
    token_ids: tuple[int, ...]
    identity: Identity
    schedule_token_count_max: int | None
    lookahead_slot_count: int
    must_fit_token_count: int
    await_token_count_min: int
    token_budget: int | None
    skip_cache_read: bool
    repeats_name: bool
    retention_hint: RetentionHint = NO_HINT

    def entry(self, handle: Handle, name: SequenceId, token_ids: list[int]) -> OpenEntry:
        """Returns the entry that opens a new sequence."""
        return OpenEntry(
            handle=handle,
            sequence_id=name,
            token_ids=np.array(token_ids, np.uint32),
            identity=self.identity,
            schedule_token_count_max=self.schedule_token_count_max,
            lookahead_slot_count=self.lookahead_slot_count,
            must_fit_token_count=self.must_fit_token_count,
            skip_cache_read=self.skip_cache_read,
            await_token_count_min=self.await_token_count_min,
            retention_hint=self.retention_hint,
        )

    def entry_again(
        self,
        handle: Handle,
        name: SequenceId,
        token_ids: list[int],
        *,
        identity: Identity,
        preemption_count: int,
    ) -> OpenEntry:
        """Returns the entry that opens a preempted sequence again."""
        return OpenEntry(
            handle=handle,
            sequence_id=name,
            token_ids=np.array(token_ids, np.uint32),
            identity=identity,
            schedule_token_count_max=self.schedule_token_count_max,
            must_fit_token_count=len(token_ids) if self.must_fit_token_count else 0,
            preemption_count=preemption_count,
        )


@dataclass(frozen=True, slots=True)
class Extension:
    """An extend entry but for the sequence's positions."""

    sequence: int
    token_ids: tuple[int, ...]
    schedule_token_count_max: int | None
    lookahead_slot_count: int
    draft_token_count: int
    rolled_back_token_count: int | None
    token_budget: int | None
    misplaced: bool

    def entry(self, sequence: NaiveSequence) -> ExtendEntry:
        """Returns the entry for a sequence as it stands."""
        rollback = None
        if self.rolled_back_token_count is not None and sequence.scheduled >= sequence.known:
            rollback = max(sequence.known, sequence.scheduled - self.rolled_back_token_count)
        return ExtendEntry(
            handle=sequence.handle,
            known_count_before=sequence.known,
            scheduled_count_before=sequence.scheduled + self.misplaced,
            token_ids=np.array(self.token_ids, np.uint32),
            schedule_token_count_max=self.schedule_token_count_max,
            lookahead_slot_count=self.lookahead_slot_count,
            rollback_to_token_count=rollback,
            draft_token_count=self.draft_token_count,
        )


@dataclass(frozen=True, slots=True)
class Forking:
    """A fork entry but for the names and positions."""

    sequence: int
    left_out_token_count: int
    repeats_name: bool

    def entry(self, parent: NaiveSequence, handle: Handle, name: SequenceId) -> ForkEntry:
        """Returns the entry that forks a sequence as it stands."""
        count = min(parent.known, parent.scheduled) - self.left_out_token_count
        return ForkEntry(
            parent_handle=parent.handle,
            child_handle=handle,
            child_sequence_id=parent.sequence_id if self.repeats_name else name,
            token_count=max(count, 1),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A decode row but for its sequence's positions."""

    sequence: int
    token_ids: tuple[int, ...]
    misplaced_by: int
    names_nobody: bool


class When(NamedTuple):
    """When a step is sent, and confirmed."""

    lag: int
    more: bool
    look: bool


WHEN = st.sampled_from(
    [
        When(lag, more, look)
        for lag in (0, 1, 0, 2, 3)
        for more in (False, False, True)
        for look in (False, False, False, True)
    ]
)
"""How many steps are left unconfirmed; whether entries are added to the step; whether all that can
be seen is compared."""


def groups(windows: Iterable[int]) -> tuple[GroupSpec, ...]:
    """Returns the groups of a pool: full attention, then these windows; 0 is full attention."""
    return (
        GroupSpec(),
        *(
            GroupSpec(GroupKind.SLIDING_WINDOW, window) if window else GroupSpec()
            for window in windows
        ),
    )


def _tokens(*, least: int, most: int) -> SearchStrategy[tuple[int, ...]]:
    """Draws tokens; few numbers, since hypothesis takes its time for each."""
    content = st.integers(0, len(TOKEN_IDS) ** most - 1)
    return st.tuples(st.integers(least, most), content).map(_digits)


def _digits(drawn: tuple[int, int]) -> tuple[int, ...]:
    count, content = drawn
    base = len(TOKEN_IDS)
    return tuple(TOKEN_IDS[content // base**place % base] for place in range(count))


def _mostly(usual: Value, *others: Value) -> SearchStrategy[Value]:
    """Draws the usual value in two cases of three."""
    return st.sampled_from((usual,) * (2 * len(others)) + others)


def _rarely(usual: Value, *others: Value) -> SearchStrategy[Value]:
    """Draws another than the usual value in one case of twelve."""
    return st.sampled_from((usual,) * (11 * len(others)) + others)


def retention_hints() -> SearchStrategy[RetentionHint]:
    """Draws hints, whose ends come within some steps."""
    return st.builds(
        RetentionHint,
        continuation=st.sampled_from(Continuation),
        priority=_mostly(0, 1, 2, 7),
        duration_ms=_mostly(0, 10, 30, 60, 100),
    )


@st.composite
def pool_specs(draw: st.DrawFn) -> PoolSpec:
    """Draws pools: small ones, some with more groups of full attention, or of windows of one token
    to three blocks."""
    block_size = draw(st.integers(1, 4))
    windows = [
        draw(st.integers(0, 3 * block_size)) for _ in range(draw(st.sampled_from((0, 1, 2))))
    ]
    return PoolSpec(
        pool_name="machine",
        block_count=draw(st.sampled_from((12, 8, 16, 24, 40))) * (1 + len(windows)),
        block_size=block_size,
        groups=groups(windows),
        vocabulary_size=VOCABULARY_SIZE,
        caching_disabled=draw(st.sampled_from((False,) * 15 + (True,))),
        model_version=draw(st.sampled_from(("", "", "w1"))),
        sub_block_reuse=draw(st.booleans()),
        merge_duplicates=draw(st.booleans()),
        eviction_policy=draw(st.sampled_from((*EVICTION_POLICIES, "arbitrary"))),
    )


def openings() -> SearchStrategy[Opening]:
    """Draws openings."""
    return st.builds(
        Opening,
        prompt=st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7)),
        shared_token_count=st.sampled_from((0, 3, 6, 9, 12, 14)),
        token_ids=_tokens(least=1, most=6),
        identity=_mostly(Identity(), *IDENTITIES),
        schedule_token_count_max=_mostly(None, 0, 1, 2, 5),
        lookahead_slot_count=_mostly(0, 1, 3),
        must_fit_token_count=_rarely(0, 8, 20, 12),
        await_token_count_min=st.sampled_from((0, 1, 0, 4)),
        token_budget=_rarely(None, 0, 2, 6),
        skip_cache_read=_mostly(False, True, False),
        repeats_name=_rarely(False, True),
        retention_hint=st.just(NO_HINT) | retention_hints(),
    )


def extensions() -> SearchStrategy[Extension]:
    """Draws extensions."""
    return st.builds(
        Extension,
        sequence=st.integers(0, 7),
        token_ids=_tokens(least=0, most=4),
        schedule_token_count_max=_mostly(None, 0, 1, 3),
        lookahead_slot_count=_mostly(0, 2),
        draft_token_count=_mostly(0, 1, 3),
        rolled_back_token_count=_mostly(None, 0, 1, 2, 5),
        token_budget=_rarely(None, 0, 2),
        misplaced=_rarely(False, True),
    )


def forkings() -> SearchStrategy[Forking]:
    """Draws forks: most at the end, some further in front, few where nothing is."""
    return st.builds(
        Forking,
        sequence=st.integers(0, 7),
        left_out_token_count=_mostly(0, 1, 2, 3, 5, 8, -1),
        repeats_name=_rarely(False, True),
    )


def rows() -> SearchStrategy[list[Row]]:
    """Draws the rows of a decode entry."""
    row = st.builds(
        Row,
        sequence=st.integers(0, 7),
        token_ids=st.one_of(_tokens(least=1, most=1), _tokens(least=0, most=3)),
        misplaced_by=_rarely(0, -1),
        names_nobody=_rarely(False, True),
    )
    return st.lists(row, min_size=1, max_size=6)
