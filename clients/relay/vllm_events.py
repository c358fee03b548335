"""A pool's events in the shape that vLLM's consumers read."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from prefixd.clients.events import BlockKey, Event, Removed, Stored
from prefixd.clients.results import KvGroup, KvGroupKind

MEDIUM = "GPU"
"""Where vLLM says that blocks of the paged memory are; routers know no other word for it."""
INT_HASH_DIGITS = 16
"""Hexadecimal digits of the 8 bytes that an integer hash is made of."""

Hash = int | bytes


def int_hash(hash_hex: str) -> int:
    """Returns the last 8 bytes of a digest as an unsigned big-endian integer: vLLM's default."""
    return int(hash_hex[-INT_HASH_DIGITS:], 16)


def bytes_hash(hash_hex: str) -> bytes:
    """Returns a whole digest, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return bytes.fromhex(hash_hex)


class HashForm(Enum):
    """How block hashes travel."""

    INT = "int"
    BYTES = "bytes"


HASH_FORMS: dict[HashForm, Callable[[str], Hash]] = {
    HashForm.INT: int_hash,
    HashForm.BYTES: bytes_hash,
}

CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def vllm_events(
    events: Sequence[Event], *, form: HashForm, groups: Sequence[KvGroup]
) -> list[dict[str, Any]]:
    """Converts events in order. A removed event has one hash, as vLLM's have.

    Stored events must carry token ids. LoRA adapters have no integer id here. One hash stands for
    one content in every KV group, so consumers keep it together with `group_idx`.
    """
    hash_of = HASH_FORMS[form]
    converted: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Stored():
                converted.append(_stored(event, hash_of, groups))
            case Removed():
                converted += [
                    {
                        "type": "BlockRemoved",
                        "block_hashes": [hash_of(hash_hex)],
                        "medium": MEDIUM,
                        "group_idx": event.group_index,
                    }
                    for hash_hex in event.hashes_hex
                ]
            case _:
                converted.append(CLEARED)
    return converted


def _stored(
    event: Stored, hash_of: Callable[[str], Hash], groups: Sequence[KvGroup]
) -> dict[str, Any]:
    assert event.token_ids is not None, "a watch for consumers asks for token ids"
    converted: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [hash_of(hash_hex) for hash_hex in event.hashes_hex],
        "parent_block_hash": hash_of(event.parent_hash_hex) if event.parent_hash_hex else None,
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None if event.lora is None else event.lora.name,
        "group_idx": event.group_index,
    }
    extra_keys = _extra_keys(event)
    if any(keys is not None for keys in extra_keys):
        converted["extra_keys"] = extra_keys
    if event.group_index < len(groups):
        group = groups[event.group_index]
        converted["kv_cache_spec_kind"] = group.kind.value
        if group.kind is KvGroupKind.SLIDING_WINDOW:
            converted["kv_cache_spec_sliding_window"] = group.window_token_count
    return converted


def _extra_keys(event: Stored) -> list[list[Any] | None]:
    """Each block's keys without tags: LoRA name, (item, offset) pairs, salt, embeddings' digest.

    Versions have no place in this shape; blocks of other versions differ in their hashes.
    """
    keys_of: dict[int, list[BlockKey]] = defaultdict(list)
    for key in event.block_keys:
        keys_of[key.index].append(key)
    extra_keys: list[list[Any] | None] = []
    for index in range(len(event.hashes_hex)):
        own = keys_of[index]
        keys: list[Any] = [] if event.lora is None else [event.lora.name]
        keys += [[key.identifier, key.offset] for key in own if key.identifier is not None]
        if index == 0 and event.cache_salt:
            keys.append(event.cache_salt)
        keys += [
            bytes.fromhex(key.prompt_embeds_digest)
            for key in own
            if key.prompt_embeds_digest is not None
        ]
        extra_keys.append(keys or None)
    return extra_keys
