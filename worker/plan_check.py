"""Checks every plan before anything is executed: a wrong slot would overwrite another's KV."""

from dataclasses import dataclass

from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.limits import PARTIAL_AWAIT_TOKEN_COUNT
from prefixd.worker.sequence import Sequence
from prefixd.worker.step import Copy, Decoded, DecodeRow, GroupPlan, Plan, StepAnswer, StepDraft


class PlanInvalid(Exception):
    """A plan contradicts the pool or the sequence it is for; it must not be executed."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The pool that plans refer to.

    Attributes:
        block_count: its blocks, block 0 included.
        block_size: token slots per block.
        sub_block_reuse: whether a match may end inside a block.
        groups: its KV groups; the first is of full attention.
    """

    block_count: int
    block_size: int
    sub_block_reuse: bool = False
    groups: tuple[KvGroup, ...] = (KvGroup(),)

    @property
    def await_token_count_min(self) -> int:
        """How many more tokens of a prefix are worth waiting for."""
        return PARTIAL_AWAIT_TOKEN_COUNT if self.sub_block_reuse else self.block_size

    def token_count_max(self, *, chunk_token_count_max: int) -> int:
        """Tokens of a sequence that fits if it has the pool for itself, computed in such chunks.

        A short one has all its blocks in every group, a long one only what the windows need.
        """
        usable_count = self.block_count - 1
        window_count = sum(
            group.held_block_count_max(chunk_token_count_max, block_size=self.block_size)
            for group in self.groups[1:]
        )
        block_count = max(usable_count // len(self.groups), usable_count - window_count)
        return block_count * self.block_size


def check_answer(answer: StepAnswer, draft: StepDraft) -> None:
    """Each entry has its outcome.

    Raises:
        PlanInvalid: counts differ.
    """
    _equal("fork outcomes", len(answer.forks), len(draft.forks))
    _equal("extend outcomes", len(answer.extends), len(draft.extends))
    _equal("open outcomes", len(answer.opens), len(draft.opens))
    for column in answer.decoded.new_block_ids:
        _equal("decode rows", len(column), len(draft.decode_rows))
    if any(not 0 <= row < len(draft.decode_rows) for row in answer.decoded.deferred):
        raise PlanInvalid("a deferred row is none of the step's rows")


def check_plan(
    plan: Plan, sequence: Sequence, *, handle: int, token_count: int, shape: PoolShape
) -> None:
    """The plan continues the sequence's table, and its slots are those of its own blocks.

    Args:
        plan: for an open or an extend.
        sequence: its state before the plan.
        handle: its handle.
        token_count: its tokens, drafts included.
        shape: of the pool.

    Raises:
        PlanInvalid: says what differs.
    """
    _equal("handle", plan.handle, handle)
    _equal("scheduled start", plan.scheduled_start, plan.cached_end)
    if not sequence.scheduled_count <= plan.scheduled_start <= plan.scheduled_end:
        raise PlanInvalid(
            f"positions [{plan.scheduled_start}, {plan.scheduled_end}) do not follow the"
            f" {sequence.scheduled_count} scheduled ones"
        )
    if plan.scheduled_end > token_count:
        raise PlanInvalid(f"position {plan.scheduled_end - 1} is planned of {token_count} tokens")
    _equal("KV groups", len(plan.groups), len(shape.groups))
    for group, table, part in zip(shape.groups, sequence.tables, plan.groups, strict=True):
        _equal("start block", part.start_block, len(table))
        _check_part(part, (*table, *part.block_ids), plan, group, shape)
    check_copies(plan.copies, shape)


def _check_part(
    part: GroupPlan, table: tuple[int, ...], plan: Plan, group: KvGroup, shape: PoolShape
) -> None:
    """One group's slots are those of its table, and all that its rows read is there."""
    _check_window(table, group, position=plan.scheduled_start, shape=shape)
    _check_appended(part.block_ids, group, shape)
    if plan.scheduled_end > len(table) * shape.block_size:
        raise PlanInvalid(f"{len(table)} blocks do not hold {plan.scheduled_end} tokens")
    positions = range(plan.scheduled_start, plan.scheduled_end)
    _equal("slots", len(part.slots), len(positions))
    for position, slot in zip(positions, part.slots, strict=True):
        if slot != slot_of(table, position=position, block_size=shape.block_size):
            raise PlanInvalid(f"position {position} was given slot {slot} outside its block")


def check_rows(decoded: Decoded, rows: tuple[DecodeRow, ...], shape: PoolShape) -> None:
    """Each row that runs has a block for its position, and got one only if it needed it.

    Raises:
        PlanInvalid: says what differs.
    """
    if len(decoded.deferred) < len(rows):
        _equal("columns of new blocks", len(decoded.new_block_ids), len(shape.groups))
    for index, row in enumerate(rows):
        if index in decoded.deferred:
            continue
        parts = zip(shape.groups, row.sequence.tables, decoded.new_block_ids, strict=True)
        for group, table, column in parts:
            block_id = column[index]
            needs_block = row.position == len(table) * shape.block_size
            if needs_block != (block_id != 0):
                raise PlanInvalid(
                    f"position {row.position} behind {len(table)} blocks was given block {block_id}"
                )
            if needs_block:
                _check_block_ids((block_id,), shape)
            _check_window(table, group, position=row.position, shape=shape)
    check_copies(decoded.copies, shape)


def check_fork(tables: tuple[tuple[int, ...], ...], *, token_count: int, shape: PoolShape) -> None:
    """The blocks of a forked sequence hold just the tokens that it shares.

    Raises:
        PlanInvalid: says what differs.
    """
    _equal("KV groups", len(tables), len(shape.groups))
    for group, table in zip(shape.groups, tables, strict=True):
        _equal("forked blocks", len(table), -(-token_count // shape.block_size))
        _check_window(table, group, position=token_count, shape=shape)
        _check_appended(table, group, shape)


def check_copies(copies: tuple[Copy, ...], shape: PoolShape) -> None:
    """Copies stay inside the pool and inside a block.

    Raises:
        PlanInvalid: says what does not.
    """
    for copy in copies:
        _check_block_ids((copy.source_block_id, copy.target_block_id), shape)
        if not 0 < copy.token_count <= shape.block_size:
            raise PlanInvalid(f"a copy of {copy.token_count} tokens of a block")


def slot_of(block_ids: tuple[int, ...] | list[int], *, position: int, block_size: int) -> int:
    """Where the KV of a position lies."""
    return block_ids[position // block_size] * block_size + position % block_size


def _check_window(
    table: tuple[int, ...] | list[int], group: KvGroup, *, position: int, shape: PoolShape
) -> None:
    """The rows from a position on find all that they read."""
    if group.window_token_count is None:
        return  # block 0 never comes into such a table
    if 0 in table[group.first_read_block(position, block_size=shape.block_size) :]:
        raise PlanInvalid(f"position {position} reads a block that its window let go")


def _check_appended(block_ids: tuple[int, ...], group: KvGroup, shape: PoolShape) -> None:
    """They are blocks of the pool; a window group may leave places empty."""
    may_be_empty = group.window_token_count is not None
    _check_block_ids(tuple(b for b in block_ids if b or not may_be_empty), shape)


def _check_block_ids(block_ids: tuple[int, ...], shape: PoolShape) -> None:
    for block_id in block_ids:
        if not 0 < block_id < shape.block_count:
            raise PlanInvalid(f"block {block_id} is none of blocks 1 to {shape.block_count - 1}")


def _equal(what: str, given: int, expected: int) -> None:
    if given != expected:
        raise PlanInvalid(f"{what}: {given}, but {expected} expected")
