"""The event log of a pool: every change of the set of published blocks, in order (rule S25).

An event is one revision. A run of blocks that is published or removed at once is one event with
several digests. Applied as set operations from any listing on, the events lead to the set of
published blocks at every later revision.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from prefixd.controller.core import limits
from prefixd.controller.core.digest_accounts import DigestAccounts
from prefixd.controller.core.digests import DigestWork
from prefixd.controller.core.errors import EventsCompacted, FieldInvalid
from prefixd.controller.core.hashing import ExtraKeys
from prefixd.controller.core.identity import RootKey
from prefixd.controller.core.messages import BlockHash
from prefixd.controller.core.node import Node
from prefixd.controller.core.sequences import TOKEN_BYTES

EVENT_OVERHEAD_BYTES = 256
"""What an event counts for beside its digests, tokens and keys, so that small ones are bounded
too."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks was published; each block's parent is the one before it.

    `digests` and `token_ids` are packed; `parent_hash` is None where the run begins a sequence;
    `varied_keys` by block of the run.
    """

    revision: int
    group_index: int
    parent_hash: BlockHash | None
    digests: bytes
    token_ids: bytes
    root_key: RootKey
    varied_keys: Mapping[int, ExtraKeys]

    def extra_keys(self, block_index: int) -> ExtraKeys:
        """Return all extra keys of one block of the run, in the order of rule S2."""
        return self.root_key.extra_keys(
            self.varied_keys.get(block_index, ()),
            is_first_block=block_index == 0 and self.parent_hash is None,
        )


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are published no longer; `digests` are packed, descendants before ancestors."""

    revision: int
    group_index: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class PoolCleared:
    """No block is published any more."""

    revision: int


Event = BlocksStored | BlocksRemoved | PoolCleared


class EventLog:
    """The last events of one pool; `accounts` has one item per KV group.

    Invariants: the kept events have consecutive revisions, the last one is `revision`; those that
    are kept count for at most `bytes_kept_max`, the last one aside.
    """

    def __init__(
        self,
        digests: DigestWork,
        accounts: Sequence[DigestAccounts],
        *,
        block_bytes: int,
        bytes_kept_max: int,
    ) -> None:
        self.revision = 0
        self._digests = digests
        self._accounts = accounts
        self._block_bytes = block_bytes
        self._bytes_kept_max = bytes_kept_max
        self._blocks_max = min(
            limits.EVENT_BLOCKS_MAX, max(1, limits.EVENT_TOKENS_MAX * TOKEN_BYTES // block_bytes)
        )
        self._kept: deque[Event] = deque()
        self._kept_bytes = 0

    @property
    def oldest_revision(self) -> int:
        """Revision of the oldest event that is kept; the next one's where none is."""
        return self.revision + 1 - len(self._kept)

    def store(self, node: Node, *, start: int, end: int) -> None:
        """Say that blocks [start, end) of a node are published; computes missing digests."""
        size = self._digests.digest_size
        if len(node.digests) < end * size:
            self._digests.complete(node, end)
        varied_keys: Mapping[int, ExtraKeys] = {}
        if node.varied_keys:
            varied_keys = {at - start: keys for at, keys in node.varied_keys.items() if at >= start}
        self.store_run(
            0,
            parent_hash=self._digests.parent_digest(node, start),
            digests=bytes(node.digests[start * size : end * size]),
            token_ids=bytes(node.tokens[start * self._block_bytes : end * self._block_bytes]),
            root_key=node.root.root_key,
            varied_keys=varied_keys,
        )

    def store_run(
        self,
        group_index: int,
        *,
        parent_hash: BlockHash | None,
        digests: bytes,
        token_ids: bytes,
        root_key: RootKey,
        varied_keys: Mapping[int, ExtraKeys],
    ) -> None:
        """Say that consecutive blocks of a group are published; the arguments are an event's."""
        size = self._digests.digest_size
        block_bytes = self._block_bytes
        for start in range(0, len(digests) // size, self._blocks_max):
            packed = digests[start * size : (start + self._blocks_max) * size]
            for first, last in self._accounts[group_index].publish(packed):
                begin, end = start + first, start + last
                parent_digest = digests[(begin - 1) * size : begin * size] if begin else parent_hash
                self.revision += 1
                self._keep(
                    BlocksStored(
                        self.revision,
                        group_index,
                        None if parent_digest is None else BlockHash(parent_digest),
                        digests[begin * size : end * size],
                        token_ids[begin * block_bytes : end * block_bytes],
                        root_key,
                        _clipped(varied_keys, begin, end),
                    )
                )

    def remove(self, node: Node, *, start: int, end: int) -> None:
        """Say that the published blocks [start, end) of a node are no longer; the last one first.

        The node still has their digests.
        """
        if start < end:
            size = self._digests.digest_size
            self.remove_run(0, _reversed(bytes(node.digests[start * size : end * size]), size))

    def remove_run(self, group_index: int, digests: bytes) -> None:
        """Say that blocks of a group are published no longer, in this order."""
        size = self._digests.digest_size
        accounts = self._accounts[group_index]
        for start in range(0, len(digests), self._blocks_max * size):
            gone = accounts.withdraw(digests[start : start + self._blocks_max * size])
            if gone:
                self.revision += 1
                self._keep(BlocksRemoved(self.revision, group_index, gone))

    def clear(self) -> None:
        """Say that no block is published any more."""
        for accounts in self._accounts:
            accounts.clear()
        self.revision += 1
        self._keep(PoolCleared(self.revision))

    def _keep(self, event: Event) -> None:
        self._kept.append(event)
        self._kept_bytes += _byte_count(event)
        while self._kept_bytes > self._bytes_kept_max and len(self._kept) > 1:
            self._kept_bytes -= _byte_count(self._kept.popleft())

    def after(
        self, revision: int, *, count_max: int, byte_count_max: int | None = None
    ) -> tuple[Event, ...]:
        """Return the events behind a revision, at most `count_max` of them.

        With `byte_count_max` none follows once they count for so many bytes. Raises EventsCompacted
        (after_revision, oldest_revision) where some are no longer kept, FieldInvalid for a revision
        that the log has not reached.
        """
        if not 0 <= revision <= self.revision:
            raise FieldInvalid(
                f"after_revision is {revision}, not in 0..{self.revision}",
                field="after_revision",
                numbers={"value": revision, "low": 0, "high": self.revision},
            )
        start = revision + 1 - self.oldest_revision
        if start < 0:
            raise EventsCompacted(
                f"the events behind revision {revision} are gone, the oldest is"
                f" {self.oldest_revision}",
                numbers={"after_revision": revision, "oldest_revision": self.oldest_revision},
            )
        events: list[Event] = []
        byte_count = 0
        for at in range(start, min(len(self._kept), start + count_max)):
            if byte_count_max is not None and byte_count >= byte_count_max:
                break
            events.append(self._kept[at])
            byte_count += _byte_count(self._kept[at])
        return tuple(events)


def _byte_count(event: Event) -> int:
    match event:
        case BlocksStored():
            packed = len(event.digests) + len(event.token_ids)
            return packed + _extra_key_bytes(event) + EVENT_OVERHEAD_BYTES
        case BlocksRemoved():
            return len(event.digests) + EVENT_OVERHEAD_BYTES
        case PoolCleared():
            return EVENT_OVERHEAD_BYTES


def _extra_key_bytes(event: BlocksStored) -> int:
    """Count the texts of an event's identity, which may be longer than all else."""
    root_key = event.root_key
    root_keys = root_key.lora_keys + root_key.salt_keys + root_key.version_keys
    keys = chain(root_keys, *event.varied_keys.values())
    return sum(len(part) for key in keys for part in key if not isinstance(part, int))


def _clipped(varied_keys: Mapping[int, ExtraKeys], start: int, end: int) -> Mapping[int, ExtraKeys]:
    if not varied_keys:
        return varied_keys
    return {at - start: keys for at, keys in varied_keys.items() if start <= at < end}


def _reversed(digests: bytes, digest_size: int) -> bytes:
    if len(digests) == digest_size:
        return digests
    starts = range(len(digests) - digest_size, -1, -digest_size)
    return b"".join(digests[start : start + digest_size] for start in starts)
