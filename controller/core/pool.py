"""One pool: its block index, free order, sequences and step log."""

from __future__ import annotations

from array import array
from collections.abc import Set

from prefixd.controller.core import limits, validate_step
from prefixd.controller.core.decoding import decode
from prefixd.controller.core.digests import DigestWork
from prefixd.controller.core.dropping import Dropped, drop_named
from prefixd.controller.core.errors import BlockNotFound, BlocksInUse, CacheError
from prefixd.controller.core.extension import extend_sequence
from prefixd.controller.core.failure import cut_unwritten
from prefixd.controller.core.forking import fork_sequence
from prefixd.controller.core.free_order import CachedRun
from prefixd.controller.core.group_decoding import decode_groups
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.identity import sequence_keys
from prefixd.controller.core.left_over import catch_up
from prefixd.controller.core.matching import find_prefix
from prefixd.controller.core.messages import (
    BlockRemap,
    CloseEntry,
    CutSequence,
    DecodeEntry,
    Entry,
    ExtendEntry,
    ForkEntry,
    Identity,
    OpenEntry,
    Outcome,
    PoolSpec,
    PrefixMatch,
    Refusal,
    Step,
    StepId,
    StepReply,
    TokenArray,
)
from prefixd.controller.core.opening import close_sequence, open_sequence
from prefixd.controller.core.sequences import pack_tokens
from prefixd.controller.core.state import PoolState, StepContext, build_state


class Pool:
    """The paged KV memory of one worker, planned step by step.

    Every method is atomic: it raises a CacheError and has changed nothing, or it is done.
    """

    def __init__(
        self,
        spec: PoolSpec,
        *,
        epoch: int,
        hasher: Hasher,
        event_bytes_kept_max: int = limits.EVENT_BYTES_KEPT_MAX,
    ) -> None:
        self.spec = spec
        self.epoch = epoch
        self._state = build_state(spec, hasher, event_bytes_kept_max=event_bytes_kept_max)
        self.events = self._state.events

    @property
    def state(self) -> PoolState:
        """The parts, all up to date; for reading by the core's own inspection and invariants."""
        catch_up(self._state)
        return self._state

    @property
    def digests(self) -> DigestWork:
        """Computes digests."""
        return self.state.digests

    @property
    def model_version(self) -> str:
        """Version of the model's weights in force."""
        return self.state.model_version

    @property
    def draining(self) -> bool:
        """Whether new sequences are refused."""
        return self.state.draining

    @property
    def sequence_count(self) -> int:
        """Open sequences."""
        return len(self.state.sequences)

    @property
    def revision(self) -> int:
        """Position in the event log: it grows by one with every event."""
        return self.events.revision

    @property
    def applied_step_id(self) -> StepId:
        """Last step applied; 0 before the first one."""
        return self.state.log.applied_id

    @property
    def executed_step_id(self) -> StepId:
        """Last step confirmed as executed."""
        return self.state.log.executed_id

    def apply_step(self, step: Step, *, now_ms: int) -> StepReply:
        """Apply the next step, or return the kept reply of a known one (the same object).

        Raises StepOutOfOrder (expected_step_id), StepsInFlight, FieldInvalid, TokenIdInvalid,
        PromptEmpty or Unsupported; `field` names the place from the step on, for instance
        `entries[2].open.token_ids[17]`. A refused step changes nothing, not even the executed id.
        What depends on state is a Refusal or a DeferredRow in the reply.
        """
        state = self.state
        log = state.log
        kept = log.known_reply(step.step_id)
        if kept is not None:
            return kept
        log.check(step)
        validate_step.step(step, self.spec)
        state.claims.lapse(now_ms=now_ms)
        self._execute(step.executed_step_id)
        remaps: tuple[BlockRemap, ...] = ()
        if self.spec.merge_duplicates:
            remaps = state.twins.merge() + state.windows.twins.merge()
        cut_sequences: tuple[CutSequence, ...] = ()
        if step.failed is not None:
            log.fail()
            cut_sequences = cut_unwritten(state, now_ms=now_ms)
        context = StepContext(step.step_id, now_ms, step.token_budget)
        outcomes = tuple(self._apply_entry(context, entry) for entry in step.entries)
        state.supply.end_step()
        available_count = state.supply.available_count
        reply = StepReply(step.step_id, outcomes, cut_sequences, available_count, remaps)
        log.append(reply, has_work=context.has_work)
        return reply

    def _execute(self, executed_step_id: StepId) -> None:
        state = self._state
        for step_id in state.log.execute(executed_step_id):
            state.index.publish(step_id)
            # What stands behind a place that a twin takes is published when that is (S25).
            while state.twins.settle():
                state.index.publish(step_id)
            state.windows.publish(step_id)

    def _apply_entry(self, context: StepContext, entry: Entry) -> Outcome:
        state = self.state
        try:
            match entry:
                case OpenEntry():
                    return open_sequence(state, context, entry)
                case ExtendEntry():
                    return extend_sequence(state, context, entry)
                case CloseEntry():
                    return close_sequence(state, context, entry)
                case ForkEntry():
                    return fork_sequence(state, entry)
                case DecodeEntry() if state.windows.count:
                    return decode_groups(state, context, entry)
                case DecodeEntry():
                    return decode(state, context, entry)
        except CacheError as error:
            return Refusal(error.reason, error.message, tuple(sorted(error.numbers.items())))

    def match_prefix(self, token_ids: TokenArray, identity: Identity) -> PrefixMatch:
        """Tell how many leading tokens of a prompt are cached; changes nothing (S8).

        Raises PromptEmpty, TokenIdInvalid or FieldInvalid, with fields `token_ids[i]` and
        `identity...`.
        """
        validate_step.prompt(token_ids, self.spec, "token_ids")
        validate_step.identity(identity, self.spec, "identity")
        if self.spec.caching_disabled or identity.has_unknown_fields:
            return PrefixMatch(0, 0)
        block_size = self.spec.block_size
        keys = sequence_keys(identity, model_version=self.model_version, block_size=block_size)
        match = find_prefix(
            self.state, keys, pack_tokens(token_ids), step_id=self.state.log.next_id
        )
        published_count = match.published_token_count(block_size)
        return PrefixMatch(published_count, match.token_count(block_size) - published_count)

    def flush(self) -> int:
        """Empty the index (S21) and return the number of dropped blocks.

        Only a step that scheduled something counts as unconfirmed: the others leave a worker
        nothing to do. Raises BlocksInUse (held_block_count, unconfirmed_step_count).
        """
        state = self.state
        held_count = state.held_block_count
        unconfirmed_count = state.log.working_count
        if held_count or unconfirmed_count:
            raise BlocksInUse(
                f"blocks held: {held_count}, steps unconfirmed: {unconfirmed_count}",
                numbers={
                    "held_block_count": held_count,
                    "unconfirmed_step_count": unconfirmed_count,
                },
            )
        if state.order.cached_count == 0:
            return 0
        dropped_count = self._drop_idle()
        state.index.clear()
        state.windows.index.clear(state.sequences.values())
        state.events.clear()
        return dropped_count

    def evict_blocks(self, *, block_ids: Set[int], digests: Set[bytes]) -> Dropped:
        """Take blocks out of the index, by id or digest, with everything cached behind them.

        Held blocks stay in their tables; their sequences publish and match nothing more. Raises
        BlockNotFound (block_id, block_count).
        """
        for block_id in sorted(block_ids):
            if not 1 <= block_id < self.spec.block_count:
                raise BlockNotFound(
                    f"block {block_id} is not in 1..{self.spec.block_count - 1}",
                    numbers={"block_id": block_id, "block_count": self.spec.block_count},
                )
        return drop_named(self.state, block_ids=block_ids, digests=digests)

    def set_model_version(self, model_version: str) -> int:
        """Drop everything computed under another version (S4); return the dropped idle blocks.

        Open sequences keep their blocks, and publish and match nothing more.
        """
        state = self.state
        if model_version == state.model_version:
            return 0
        state.model_version = model_version
        for sequence in state.sequences.values():
            table = sequence.table()
            sequence.private_block_ids = array("q", table.tolist())
            sequence.twins.clear()
            sequence.borrowed = None
            sequence.leaf = None
            sequence.indexed_count = 0
            sequence.uncacheable = True
        for node in reversed(list(state.index.nodes())):
            if node.lane.holder_count > 1:
                for block_id in node.lane.block_ids:
                    state.twins.table_counts[block_id] = node.lane.holder_count
            state.events.remove(node, start=0, end=node.lane.published_count)
        state.windows.index.tell_all_removed()
        dropped_count = self._drop_idle()
        state.index.clear()
        state.windows.index.clear(state.sequences.values())
        state.twins.forget_all()
        return dropped_count

    def _drop_idle(self) -> int:
        order = self.state.order
        dropped_count = order.cached_count
        for segment in order:
            if isinstance(segment, CachedRun):
                order.become_plain(segment)
        return dropped_count

    def drain(self) -> None:
        """Refuse new sequences from now on."""
        self.state.draining = True

    def hash_slice(self, block_count_max: int) -> bool:
        """Do what the last reply did not wait for, then compute up to that many missing digests;
        True while some are left."""
        state = self.state
        is_more = state.digests.hash_slice(block_count_max)
        return is_more or state.windows.index.digests.hash_slice(block_count_max)

    def hash_all(self) -> None:
        """Compute every missing digest."""
        state = self.state
        state.digests.hash_all()
        state.windows.index.digests.hash_all()
