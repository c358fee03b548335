"""Hashes that collide: for tests alone, no option chooses them."""

from dataclasses import dataclass, replace

from prefixd.controller.core import inspect
from prefixd.controller.core.events import BlocksRemoved, BlocksStored, Event
from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import BlockHash
from prefixd.controller.core.pool import Pool

DIGEST_SIZE = 16


@dataclass(frozen=True)
class _Hashed:
    """What a hash with `digest_count` digests makes of some bytes."""

    data: bytes
    digest_count: int

    def digest(self) -> bytes:
        """Returns one of few digests, chosen by the content."""
        return (sum(self.data) % self.digest_count).to_bytes(DIGEST_SIZE, "big")


class CollidingHasher(Hasher):
    """A hasher with few digests; with one, every block has the same."""

    def __init__(self, digest_count: int) -> None:
        super().__init__("xxhash_cbor", seed="0")
        self.algorithm = replace(
            self.algorithm, name="colliding", hashed=lambda data: _Hashed(data, digest_count)
        )
        self.root = BlockHash(self.algorithm.digest(b""))


class CollidingWatcher:
    """Knows the groups' published digests from events alone, however many blocks have one of them.

    Invariants, which the events must keep: a digest is stored where it is not, removed where it is.
    """

    def __init__(self, pool: Pool) -> None:
        self.digests: set[tuple[int, bytes]] = set()
        self.revision = 0
        self._pool = pool

    def catch_up(self, *, count_max: int) -> None:
        """Reads the events since the last time, so many at a time."""
        while self.revision < self._pool.revision:
            for event in self._pool.events.after(self.revision, count_max=count_max):
                self.revision += 1
                assert event.revision == self.revision
                self._apply(event)

    def _apply(self, event: Event) -> None:
        match event:
            case BlocksStored():
                for digest in _split(event.digests):
                    assert (event.group_index, digest) not in self.digests, "stored twice"
                    self.digests.add((event.group_index, digest))
            case BlocksRemoved():
                for digest in _split(event.digests):
                    self.digests.remove((event.group_index, digest))
            case _:
                self.digests.clear()

    def check(self) -> None:
        """Compares what the events told with the live table."""
        blocks = inspect.blocks(self._pool, after=0, count=self._pool.spec.block_count)
        assert self.digests == {
            (row.group_index, row.block_hash) for row in blocks if row.block_hash is not None
        }


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE)]
