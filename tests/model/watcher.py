"""A consumer of a pool's events, strict about their order."""

from prefixd.controller.core import inspect
from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event, PoolCleared
from prefixd.controller.core.pool import Pool


class Watcher:
    """Knows the published digests from events alone, each with its parent.

    Invariants, which the events must keep: a digest is stored once, behind its parent, and removed
    once, before its parent; revisions have no gap.
    """

    def __init__(self, pool: Pool) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.revision = 0
        self.tokens: dict[bytes, bytes] = {}
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
                parent = event.parent_hash
                block_bytes = len(event.token_ids) // (len(event.digests) // size)
                for index, digest in enumerate(_split(event.digests, size)):
                    assert digest not in self.parents, "stored twice"
                    assert parent is None or parent in self.parents, "stored before its parent"
                    self.parents[digest] = parent
                    start = index * block_bytes
                    self.tokens[digest] = event.token_ids[start : start + block_bytes]
                    parent = digest
            case BlocksRemoved():
                for digest in _split(event.digests, size):
                    assert digest in self.parents, "removed, but not stored"
                    assert digest not in self.parents.values(), "removed before its children"
                    del self.parents[digest]
            case PoolCleared():
                self.parents.clear()

    def check(self) -> None:
        """Compares what the events told with the live table."""
        blocks = inspect.blocks(self._pool, after=0, count=self._pool.spec.block_count)
        live = {row.block_hash: row.parent_hash for row in blocks if row.block_hash is not None}
        assert self.parents == live


def _split(digests: bytes, size: int) -> list[bytes]:
    return [digests[start : start + size] for start in range(0, len(digests), size)]
