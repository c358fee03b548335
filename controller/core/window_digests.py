"""Digests of the sliding-window groups' places, in slices or when a block there is published.

They are those of the full-attention index for the same content, computed again: the blocks of a
place come and go apart from each other.
"""

from collections.abc import Sequence
from itertools import islice

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.messages import BlockHash
from prefixd.controller.core.window_blocks import WindowPlace


class WindowDigests:
    """Fills in the digests of places.

    Invariants: `unhashed` has exactly the places without a digest, parents before children; a place
    has a digest only where its parent has one.
    """

    def __init__(self, hasher: Hasher) -> None:
        self.unhashed: dict[WindowPlace, None] = {}
        self._hasher = hasher

    def note(self, place: WindowPlace) -> None:
        """Say that a place is new."""
        self.unhashed[place] = None

    def forget(self, place: WindowPlace) -> None:
        """Say that a place is gone."""
        self.unhashed.pop(place, None)

    def hash_slice(self, place_count_max: int) -> bool:
        """Compute up to that many missing digests; True while some are left."""
        left_count = place_count_max
        while self.unhashed and left_count > 0:
            run: list[WindowPlace] = []
            for place in islice(self.unhashed, left_count):
                if run and place.parent is not run[-1]:
                    break
                run.append(place)
            self._hash(run)
            left_count -= len(run)
        return bool(self.unhashed)

    def hash_all(self) -> None:
        """Compute every missing digest."""
        while self.hash_slice(1_024):
            pass

    def digest(self, place: WindowPlace) -> BlockHash:
        """Return the digest of a place, computing what is missing on the way to it."""
        missing: list[WindowPlace] = []
        at: WindowPlace | None = place
        while at is not None and not at.is_root and not at.digest:
            missing.append(at)
            at = at.parent
        if missing:
            missing.reverse()
            self._hash(missing)
        return BlockHash(place.digest)

    def parent_digest(self, place: WindowPlace) -> BlockHash | None:
        """Return the digest of the place before, None for a sequence's first block."""
        parent = place.parent
        return None if parent is None or parent.is_root else self.digest(parent)

    def recompute(self, place: WindowPlace) -> BlockHash:
        """Return the digest of a place, computed again from its content and its parent's digest."""
        return BlockHash(self._chain((place,)))

    def _hash(self, run: Sequence[WindowPlace]) -> None:
        packed = self._chain(run)
        size = self._hasher.algorithm.digest_size
        for index, place in enumerate(run):
            place.digest = packed[index * size : (index + 1) * size]
            del self.unhashed[place]

    def _chain(self, run: Sequence[WindowPlace]) -> bytes:
        parent_digest = self.parent_digest(run[0])
        return self._hasher.chain(
            self._hasher.root if parent_digest is None else parent_digest,
            b"".join(place.tokens for place in run),
            [
                place.root_key.extra_keys(
                    place.varied_keys,
                    is_first_block=index == 0 and parent_digest is None,
                )
                for index, place in enumerate(run)
            ],
        )
