"""A pool's events as clients see them, and how they are read off the wire."""

from collections.abc import Mapping
from dataclasses import dataclass

from prefixd.clients import results
from prefixd.clients.encoding import encodes
from prefixd.v1 import events_pb2


@dataclass(frozen=True, slots=True)
class BlockKey:
    """An extra key of one block of a run: a multimodal item, or a digest of prompt embeddings.

    `index` is the block's in the run; `offset` is where the item begins, in tokens from the block's
    begin, and may be negative. `identifier` is None for embeddings, `prompt_embeds_digest`, in
    hexadecimal, for items.
    """

    index: int
    identifier: str | None
    offset: int
    prompt_embeds_digest: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks was published; each block's parent is the one before it.

    `parent_hash_hex` is empty where the run begins a sequence; `token_ids` are None unless they
    were asked for.
    """

    revision: int
    hashes_hex: tuple[str, ...]
    parent_hash_hex: str
    token_ids: tuple[int, ...] | None
    block_size: int
    group_index: int
    lora: results.LoraAdapter | None
    cache_salt: str
    model_version: str
    block_keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are published no longer, descendants before ancestors."""

    revision: int
    hashes_hex: tuple[str, ...]
    group_index: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block is published any more."""

    revision: int


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Events:
    """Consecutive events of one epoch, up to a revision; none at all is a sign of life."""

    epoch: int
    through_revision: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """What to watch: events behind `after_revision`; None: those that come from now on.

    `epoch` None is the epoch that is live when the watch begins.
    """

    pool_name: str
    epoch: int | None = None
    after_revision: int | None = None
    with_token_ids: bool = False


@encodes
def watch_message(watched: Watched) -> events_pb2.WatchEventsRequest:
    """Converts what to watch."""
    return events_pb2.WatchEventsRequest(
        pool_name=watched.pool_name,
        epoch=watched.epoch or 0,
        after_revision=watched.after_revision,
        with_token_ids=watched.with_token_ids,
    )


def events_of(message: events_pb2.WatchEventsResponse, *, with_token_ids: bool) -> Events:
    """Reads a response; an event of a kind that this version does not know is left out."""
    events: list[Event] = []
    for event in message.events:
        match event.WhichOneof("event"):
            case "stored":
                events.append(_stored(event, with_token_ids=with_token_ids))
            case "removed":
                removed = event.removed
                events.append(
                    Removed(event.revision, tuple(removed.hashes_hex), removed.group_index)
                )
            case "cleared":
                events.append(Cleared(event.revision))
    return Events(message.epoch, message.through_revision, tuple(events))


def _stored(event: events_pb2.PoolEvent, *, with_token_ids: bool) -> Stored:
    stored = event.stored
    lora = None
    if stored.HasField("lora"):
        lora = results.LoraAdapter(stored.lora.name, stored.lora.path, stored.lora.version)
    return Stored(
        revision=event.revision,
        hashes_hex=tuple(stored.hashes_hex),
        parent_hash_hex=stored.parent_hash_hex,
        token_ids=tuple(stored.token_ids) if with_token_ids else None,
        block_size=stored.block_size,
        group_index=stored.group_index,
        lora=lora,
        cache_salt=stored.cache_salt,
        model_version=stored.model_version,
        block_keys=tuple(map(_block_key, stored.block_keys)),
    )


def _block_key(key: events_pb2.BlockKey) -> BlockKey:
    if key.WhichOneof("key") == "multimodal":
        item = key.multimodal
        return BlockKey(key.index, item.identifier, item.offset, None)
    return BlockKey(key.index, None, 0, key.prompt_embeds_digest.hex())


KINDS: Mapping[type[Event], str] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}
"""What each kind of event is called on the command line."""
