"""Events of a pool: core to protobuf."""

from collections.abc import Iterable

import numpy as np

from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event, PoolCleared
from prefixd.controller.core.hashing import ExtraKeys
from prefixd.controller.core.pool import Pool
from prefixd.v1 import events_pb2, types_pb2


def events_message(
    pool: Pool, events: Iterable[Event], *, through_revision: int, with_token_ids: bool
) -> events_pb2.WatchEventsResponse:
    """Converts consecutive events of a pool."""
    return events_pb2.WatchEventsResponse(
        epoch=pool.epoch,
        through_revision=through_revision,
        events=[_event(pool, event, with_token_ids=with_token_ids) for event in events],
    )


def _event(pool: Pool, event: Event, *, with_token_ids: bool) -> events_pb2.PoolEvent:
    match event:
        case BlocksStored():
            stored = _stored(pool, event)
            if with_token_ids:
                stored.token_ids.extend(np.frombuffer(event.token_ids, dtype="<u4"))
            return events_pb2.PoolEvent(revision=event.revision, stored=stored)
        case BlocksRemoved():
            removed = events_pb2.BlocksRemoved(
                hashes_hex=_hashes_hex(pool, event.digests), group_index=event.group_index
            )
            return events_pb2.PoolEvent(revision=event.revision, removed=removed)
        case PoolCleared():
            return events_pb2.PoolEvent(revision=event.revision, cleared=events_pb2.PoolCleared())


def _stored(pool: Pool, event: BlocksStored) -> events_pb2.BlocksStored:
    root_key = event.root_key
    message = events_pb2.BlocksStored(
        hashes_hex=_hashes_hex(pool, event.digests),
        parent_hash_hex="" if event.parent_hash is None else event.parent_hash.hex(),
        block_size=pool.spec.block_size,
        group_index=event.group_index,
    )
    versions = {str(tag): str(value) for tag, value in root_key.version_keys}
    message.model_version = versions.get("model_version", "")
    for _, name, path in root_key.lora_keys:
        message.lora.CopyFrom(
            types_pb2.LoraAdapter(
                name=str(name), path=str(path), version=versions.get("lora_version", "")
            )
        )
    if event.parent_hash is None:
        for _, salt in root_key.salt_keys:
            message.cache_salt = str(salt)
    for index, keys in sorted(event.varied_keys.items()):
        message.block_keys.extend(_block_keys(index, keys))
    return message


def _block_keys(index: int, keys: ExtraKeys) -> Iterable[events_pb2.BlockKey]:
    for key in keys:
        match key:
            case ("mm", str(identifier), int(offset)):
                item = events_pb2.MultimodalKey(identifier=identifier, offset=offset)
                yield events_pb2.BlockKey(index=index, multimodal=item)
            case ("prompt_embeds", bytes(digest)):
                yield events_pb2.BlockKey(index=index, prompt_embeds_digest=digest)
            case _:
                raise AssertionError(f"no block has an extra key {key[0]!r} of its own")


def _hashes_hex(pool: Pool, digests: bytes) -> list[str]:
    text = digests.hex()
    size = pool.digests.digest_size * 2
    return [text[start : start + size] for start in range(0, len(text), size)]
