"""What a step alone shows to be malformed; the whole step is refused for it.

Everything here raises FieldInvalid, TokenIdInvalid, PromptEmpty or Unsupported with the path of the
field, and reads no state but the pool's spec.
"""

import numpy as np

from prefixd.controller.core import limits
from prefixd.controller.core.errors import (
    FieldInvalid,
    PromptEmpty,
    TokenIdInvalid,
)
from prefixd.controller.core.hints import NO_HINT, RetentionHint
from prefixd.controller.core.messages import (
    CloseEntry,
    DecodeEntry,
    ExtendEntry,
    ForkEntry,
    Identity,
    IntArray,
    OpenEntry,
    PoolSpec,
    Step,
    TokenArray,
)
from prefixd.controller.core.validate import count_in_range, length_at_most

HANDLE_MAX = 2**32 - 1
"""Largest handle."""
EMBEDS_DIGEST_BYTES = 32
"""Length of a prompt-embeds digest."""
_TOKENS_MAX = limits.TOKENS_PER_SEQUENCE_MAX


def step(message: Step, spec: PoolSpec) -> None:
    """Check a whole step."""
    if message.token_budget is not None:
        count_in_range(message.token_budget, low=0, high=2**31 - 1, field="token_budget")
    for index, entry in enumerate(message.entries):
        match entry:
            case OpenEntry():
                _open(entry, spec, f"entries[{index}].open")
            case ExtendEntry():
                _extend(entry, spec, f"entries[{index}].extend")
            case DecodeEntry():
                _decode(entry, spec, f"entries[{index}].decode")
            case CloseEntry():
                _close(entry, f"entries[{index}].close")
            case ForkEntry():
                _fork(entry, f"entries[{index}].fork")
    _new_handles(message)


def prompt(token_ids: TokenArray, spec: PoolSpec, field: str) -> None:
    """Check the tokens of a whole prompt."""
    if len(token_ids) == 0:
        raise PromptEmpty(f"{field} is empty", field=field)
    _tokens(token_ids, spec, field)


def _tokens(token_ids: TokenArray, spec: PoolSpec, field: str) -> None:
    if len(token_ids) > _TOKENS_MAX:
        raise FieldInvalid(
            f"{field} has {len(token_ids)} tokens, more than {_TOKENS_MAX}",
            numbers={"token_count": len(token_ids), "tokens_per_sequence_max": _TOKENS_MAX},
            field=field,
        )
    if spec.vocabulary_size == 0 or len(token_ids) == 0:
        return
    if int(token_ids.max()) < spec.vocabulary_size:
        return
    index = int(np.argmax(token_ids >= spec.vocabulary_size))
    raise TokenIdInvalid(
        f"{field}[{index}] is {token_ids[index]}, not below {spec.vocabulary_size}",
        numbers={
            "index": index,
            "token_id": int(token_ids[index]),
            "vocabulary_size": spec.vocabulary_size,
        },
        field=f"{field}[{index}]",
    )


def _handle(handle: int, field: str) -> None:
    count_in_range(handle, low=0, high=HANDLE_MAX, field=field)


def _tokens_count(value: int, field: str) -> None:
    count_in_range(value, low=0, high=_TOKENS_MAX, field=field)


def _open(entry: OpenEntry, spec: PoolSpec, field: str) -> None:
    _handle(entry.handle, f"{field}.handle")
    _sequence_id(entry.sequence_id, f"{field}.sequence_id")
    prompt(entry.token_ids, spec, f"{field}.token_ids")
    if entry.schedule_token_count_max is not None:
        _non_negative(entry.schedule_token_count_max, f"{field}.schedule_token_count_max")
    _tokens_count(entry.lookahead_slot_count, f"{field}.lookahead_slot_count")
    _tokens_count(entry.must_fit_token_count, f"{field}.must_fit_token_count")
    _non_negative(entry.preemption_count, f"{field}.preemption_count")
    _non_negative(entry.await_token_count_min, f"{field}.await_token_count_min")
    identity(entry.identity, spec, f"{field}.identity")
    if entry.retention_hint is not NO_HINT:
        _retention_hint(entry.retention_hint, f"{field}.retention_hint")


def _close(entry: CloseEntry, field: str) -> None:
    _handle(entry.handle, f"{field}.handle")
    if entry.retention_hint is not None:
        _retention_hint(entry.retention_hint, f"{field}.retention_hint")


def _retention_hint(hint: RetentionHint, field: str) -> None:
    count_in_range(
        hint.priority, low=0, high=limits.RETENTION_PRIORITY_MAX, field=f"{field}.priority"
    )
    count_in_range(
        hint.duration_ms, low=0, high=limits.RETENTION_MS_MAX, field=f"{field}.duration_ms"
    )


def _sequence_id(sequence_id: str, field: str) -> None:
    id_bytes = len(sequence_id.encode())
    if not 1 <= id_bytes <= limits.SEQUENCE_ID_BYTES_MAX:
        raise FieldInvalid(
            f"{field} has {id_bytes} bytes, not 1..{limits.SEQUENCE_ID_BYTES_MAX}",
            numbers={"length": id_bytes, "length_max": limits.SEQUENCE_ID_BYTES_MAX},
            field=field,
        )


def _fork(entry: ForkEntry, field: str) -> None:
    _handle(entry.parent_handle, f"{field}.parent_handle")
    _handle(entry.child_handle, f"{field}.child_handle")
    _sequence_id(entry.child_sequence_id, f"{field}.child_sequence_id")
    count_in_range(entry.token_count, low=1, high=_TOKENS_MAX, field=f"{field}.token_count")


def _new_handles(message: Step) -> None:
    """A handle names one sequence of the epoch, so a step gives it out once."""
    seen: set[int] = set()
    for index, entry in enumerate(message.entries):
        match entry:
            case OpenEntry():
                handle, field = entry.handle, f"entries[{index}].open.handle"
            case ForkEntry():
                handle, field = entry.child_handle, f"entries[{index}].fork.child_handle"
            case _:
                continue
        if handle in seen:
            raise FieldInvalid(
                f"{field} gives out handle {handle} twice", numbers={"handle": handle}, field=field
            )
        seen.add(handle)


def _non_negative(value: int, field: str) -> None:
    count_in_range(value, low=0, high=2**31 - 1, field=field)


def identity(value: Identity, spec: PoolSpec, field: str) -> None:
    """Check an identity."""
    length_at_most(
        value.cache_salt, length_max=limits.CACHE_SALT_LENGTH_MAX, field=f"{field}.cache_salt"
    )
    if value.lora is not None:
        name_max = limits.IDENTIFIER_LENGTH_MAX
        if not value.lora.name:
            raise FieldInvalid(f"{field}.lora.name is empty", field=f"{field}.lora.name")
        length_at_most(value.lora.name, length_max=name_max, field=f"{field}.lora.name")
        length_at_most(value.lora.version, length_max=name_max, field=f"{field}.lora.version")
        length_at_most(
            value.lora.path, length_max=limits.LORA_PATH_LENGTH_MAX, field=f"{field}.lora.path"
        )
    if value.multimodal_items:
        _multimodal_items(value, f"{field}.multimodal_items")
    for index, digest in enumerate(value.prompt_embeds_digests):
        if len(digest) != EMBEDS_DIGEST_BYTES:
            raise FieldInvalid(
                f"{field}.prompt_embeds_digests[{index}] has {len(digest)} bytes,"
                f" not {EMBEDS_DIGEST_BYTES}",
                numbers={"length": len(digest), "length_expected": EMBEDS_DIGEST_BYTES},
                field=f"{field}.prompt_embeds_digests[{index}]",
            )
    count_in_range(
        len(value.prompt_embeds_digests),
        low=0,
        high=_TOKENS_MAX // spec.block_size,
        field=f"{field}.prompt_embeds_digests",
    )


def _multimodal_items(value: Identity, field: str) -> None:
    count_in_range(
        len(value.multimodal_items), low=0, high=limits.MULTIMODAL_ITEMS_MAX, field=field
    )
    offset_min = 0
    covered_count = 0
    for index, item in enumerate(value.multimodal_items):
        item_field = f"{field}[{index}]"
        if not item.identifier:
            raise FieldInvalid(
                f"{item_field}.identifier is empty", field=f"{item_field}.identifier"
            )
        length_at_most(
            item.identifier,
            length_max=limits.IDENTIFIER_LENGTH_MAX,
            field=f"{item_field}.identifier",
        )
        # Ascending offsets give equal items equal extra keys.
        count_in_range(item.offset, low=offset_min, high=_TOKENS_MAX, field=f"{item_field}.offset")
        covered_count += max(0, item.token_count)
        count_in_range(
            item.token_count,
            low=1,
            high=_TOKENS_MAX - item.offset,
            field=f"{item_field}.token_count",
        )
        offset_min = item.offset
    count_in_range(covered_count, low=0, high=_TOKENS_MAX, field=field)


def _extend(entry: ExtendEntry, spec: PoolSpec, field: str) -> None:
    _handle(entry.handle, f"{field}.handle")
    _tokens_count(entry.known_count_before, f"{field}.known_count_before")
    _tokens_count(entry.scheduled_count_before, f"{field}.scheduled_count_before")
    _tokens(entry.token_ids, spec, f"{field}.token_ids")
    if entry.schedule_token_count_max is not None:
        _non_negative(entry.schedule_token_count_max, f"{field}.schedule_token_count_max")
    _tokens_count(entry.lookahead_slot_count, f"{field}.lookahead_slot_count")
    _tokens_count(entry.draft_token_count, f"{field}.draft_token_count")
    if entry.rollback_to_token_count is not None:
        # Known tokens are accepted ones: a rollback rejects drafts only (S14).
        count_in_range(
            entry.rollback_to_token_count,
            low=entry.known_count_before,
            high=entry.scheduled_count_before,
            field=f"{field}.rollback_to_token_count",
        )


def _decode(entry: DecodeEntry, spec: PoolSpec, field: str) -> None:
    row_count = len(entry.handles)
    count_in_range(row_count, low=0, high=limits.DECODE_ROWS_MAX, field=f"{field}.handles")
    handles = entry.handles
    _column(handles, row_count, HANDLE_MAX, f"{field}.handles")
    scheduled, known = entry.scheduled_count_before, entry.known_count_before
    _column(scheduled, row_count, _TOKENS_MAX, f"{field}.scheduled_count_before")
    if known is not scheduled:
        _column(known, row_count, _TOKENS_MAX, f"{field}.known_count_before")
    _column(entry.token_counts, row_count, _TOKENS_MAX, f"{field}.token_counts")
    token_count = int(np.add.reduce(entry.token_counts))
    if token_count != len(entry.token_ids):
        raise FieldInvalid(
            f"{field}.token_ids has {len(entry.token_ids)} tokens, token_counts say {token_count}",
            numbers={"token_count": len(entry.token_ids), "token_count_expected": token_count},
            field=f"{field}.token_ids",
        )
    _tokens(entry.token_ids, spec, f"{field}.token_ids")
    if np.count_nonzero(handles[1:] <= handles[:-1]) == 0:
        return  # Ascending, as most drivers send them: none stands twice.
    if len(set(handles.tolist())) != row_count:
        _, first_at = np.unique(handles, return_index=True)
        index = int(np.setdiff1d(np.arange(row_count), first_at)[0])
        raise FieldInvalid(
            f"{field}.handles[{index}] names handle {handles[index]} twice",
            numbers={"handle": handles[index]},
            field=f"{field}.handles[{index}]",
        )


def _column(column: IntArray, row_count: int, high: int, field: str) -> None:
    if len(column) != row_count:
        raise FieldInvalid(
            f"{field} has {len(column)} rows, handles have {row_count}",
            numbers={"row_count": len(column), "row_count_expected": row_count},
            field=field,
        )
    wide = column if column.dtype == np.int64 else column.astype(np.int64)
    # Negative values are huge as unsigned ones, so one pass finds both bounds broken.
    if np.count_nonzero(wide.view(np.uint64) > high) == 0:
        return
    index = int(np.argmax((column < 0) | (column > high)))
    count_in_range(int(column[index]), low=0, high=high, field=f"{field}[{index}]")
