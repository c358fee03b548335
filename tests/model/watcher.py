"""A consumer of a pool's events, strict about their order."""

from prefixd.controller.core import inspect
from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event, PoolCleared
from prefixd.controller.core.pool import Pool

Place = tuple[int, bytes]
"""A KV group and the digest of a block's content."""


class Watcher:
    """Knows the published blocks' digests from events alone, by KV group, each with its parent.

    Invariants, which the events must keep: a group's digest is stored once and removed once;
    revisions have no gap; in the first group, of full attention, a digest is stored behind its
    parent and removed before it.
    """

    def __init__(self, pool: Pool) -> None:
        self.parents: dict[Place, bytes | None] = {}
        self.revision = 0
        self.tokens: dict[Place, bytes] = {}
        self._pool = pool

    def catch_up(self, *, count_max: int) -> None:
        """Reads the events since the last time, so many at a time."""
        while self.revision < self._pool.revision:
            for event in self._pool.events.after(self.revision, count_max=count_max):
                self.revision += 1
                assert event.revision == self.revision
                self._apply(event)

    def _apply(self, event: Event) -> None:
        size = self._pool.digests.digest_size
        match event:
            case BlocksStored():
                group = event.group_index
                parent = event.parent_hash
                block_bytes = len(event.token_ids) // (len(event.digests) // size)
                for index, digest in enumerate(_split(event.digests, size)):
                    assert (group, digest) not in self.parents, "stored twice"
                    if group == 0:
                        assert parent is None or (0, parent) in self.parents, "before its parent"
                    self.parents[group, digest] = parent
                    start = index * block_bytes
                    self.tokens[group, digest] = event.token_ids[start : start + block_bytes]
                    parent = digest
            case BlocksRemoved():
                group = event.group_index
                for digest in _split(event.digests, size):
                    assert (group, digest) in self.parents, "removed, but not stored"
                    if group == 0:
                        assert not self._has_children(digest), "removed before its children"
                    del self.parents[group, digest]
            case PoolCleared():
                self.parents.clear()

    def _has_children(self, digest: bytes) -> bool:
        return any(group == 0 and parent == digest for (group, _), parent in self.parents.items())

    def check(self) -> None:
        """Compares what the events told with the live table."""
        blocks = inspect.blocks(self._pool, after=0, count=self._pool.spec.block_count)
        live = {
            (row.group_index, row.block_hash): row.parent_hash
            for row in blocks
            if row.block_hash is not None
        }
        assert self.parents == live


def _split(digests: bytes, size: int) -> list[bytes]:
    return [digests[start : start + size] for start in range(0, len(digests), size)]
