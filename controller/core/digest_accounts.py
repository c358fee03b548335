"""Which digests the published blocks of a pool have, so that events come once per digest (S25).

Blocks with equal content share a place of the index, so two published blocks have one digest only
where the hash collides. With a cryptographic algorithm nobody can bring that about; with another
one somebody may, and then one content's removal must not be told as the other's.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prefixd.controller.core.hashing import HashAlgorithm


class DigestAccounts(Protocol):
    """Tells apart the first and the last published block of each digest."""

    def publish(self, digests: bytes) -> Iterator[tuple[int, int]]:
        """Account for published blocks with these packed digests.

        Yield the runs [start, end) of those whose digest no other published block has.
        """

    def withdraw(self, digests: bytes) -> bytes:
        """Account for blocks that are published no longer; return the digests that none has now."""

    def clear(self) -> None:
        """Forget every block."""


class UniqueDigests:
    """Takes it that no two published blocks have one digest, and keeps nothing."""

    def __init__(self, digest_size: int) -> None:
        self._digest_size = digest_size

    def publish(self, digests: bytes) -> Iterator[tuple[int, int]]:
        """Yield the run of all blocks."""
        yield 0, len(digests) // self._digest_size

    def withdraw(self, digests: bytes) -> bytes:
        """Return all digests."""
        return digests

    def clear(self) -> None:
        """Do nothing: nothing is kept."""


class CountedDigests:
    """Counts the published blocks of each digest; costs memory for each of them."""

    def __init__(self, digest_size: int) -> None:
        self._digest_size = digest_size
        self._block_counts = Counter[bytes]()

    def publish(self, digests: bytes) -> Iterator[tuple[int, int]]:
        """Yield the runs of blocks that are the first ones of their digest."""
        start = 0
        split = _split(digests, self._digest_size)
        for index, digest in enumerate(split):
            self._block_counts[digest] += 1
            if self._block_counts[digest] > 1:
                if start < index:
                    yield start, index
                start = index + 1
        if start < len(split):
            yield start, len(split)

    def withdraw(self, digests: bytes) -> bytes:
        """Return the digests whose last block this was, in the order given."""
        gone = []
        for digest in _split(digests, self._digest_size):
            self._block_counts[digest] -= 1
            if not self._block_counts[digest]:
                del self._block_counts[digest]
                gone.append(digest)
        return b"".join(gone)

    def clear(self) -> None:
        """Forget every count."""
        self._block_counts.clear()


def digest_accounts(algorithm: HashAlgorithm) -> DigestAccounts:
    """Return the cheapest accounts that are right for the digests of an algorithm."""
    chosen = UniqueDigests if algorithm.is_cryptographic else CountedDigests
    return chosen(algorithm.digest_size)


def _split(digests: bytes, digest_size: int) -> list[bytes]:
    return [digests[at : at + digest_size] for at in range(0, len(digests), digest_size)]
