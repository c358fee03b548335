"""Computing the digests of indexed blocks, in slices or when their blocks are published."""

from prefixd.controller.core.hashing import ExtraKeys, Hasher
from prefixd.controller.core.messages import BlockHash
from prefixd.controller.core.node import Node, Root


class DigestWork:
    """Fills in the digests that matching and allocation did not need.

    Invariants: the digests of a node are a prefix of its blocks and cover all published ones; a
    node has some only where its parent has all; `unhashed` has exactly the nodes with missing ones.
    """

    def __init__(self, hasher: Hasher, *, block_bytes: int) -> None:
        self.unhashed: dict[Node, None] = {}
        self.digest_size = hasher.algorithm.digest_size
        self._hasher = hasher
        self._block_bytes = block_bytes

    def note(self, node: Node) -> None:
        """Find out whether a node that changed lacks digests."""
        if len(node.digests) < node.block_count * self.digest_size:
            self.unhashed[node] = None
        else:
            self.unhashed.pop(node, None)

    def forget(self, node: Node) -> None:
        """Drop a node that left the index."""
        self.unhashed.pop(node, None)

    def hash_slice(self, block_count_max: int) -> bool:
        """Compute up to that many missing digests; True while some are left."""
        unhashed = self.unhashed
        left_count = block_count_max
        while unhashed and left_count > 0:
            node = self._topmost(next(iter(unhashed)))
            left_count -= self._hash(node, left_count)
        return bool(unhashed)

    def hash_all(self) -> None:
        """Compute every missing digest."""
        while self.hash_slice(1_024):
            pass

    def digest(self, node: Node, offset: int) -> BlockHash:
        """Return the digest of a node's block, computing what is missing up to it."""
        self.complete(node, offset + 1)
        size = self.digest_size
        return BlockHash(bytes(node.digests[offset * size : (offset + 1) * size]))

    def complete(self, node: Node, block_count: int) -> None:
        """Compute what is missing of the digests of a node's first blocks."""
        while len(node.digests) < block_count * self.digest_size:
            self._hash(self._topmost(node), node.block_count + block_count)

    def parent_digest(self, node: Node, offset: int) -> BlockHash | None:
        """Return the digest of the block before, None for a sequence's first block."""
        if offset > 0:
            return self.digest(node, offset - 1)
        if isinstance(node.parent, Root):
            return None
        return self.digest(node.parent, node.parent.block_count - 1)

    def _topmost(self, node: Node) -> Node:
        """Return the node nearest to the root on this path that lacks digests."""
        topmost = node
        while isinstance(node.parent, Node):
            node = node.parent
            if node in self.unhashed:
                topmost = node
        return topmost

    def recompute(self, node: Node, block_count: int) -> bytes:
        """Return the packed digests of a node's first blocks, computed again from its content."""
        return self._chain(node, start=0, end=block_count)

    def _hash(self, node: Node, block_count_max: int) -> int:
        start = len(node.digests) // self.digest_size
        end = min(node.block_count, start + block_count_max)
        node.digests += self._chain(node, start=start, end=end)
        if end == node.block_count:
            del self.unhashed[node]
        return end - start

    def _chain(self, node: Node, *, start: int, end: int) -> bytes:
        size = self.digest_size
        if start > 0:
            parent_digest = bytes(node.digests[(start - 1) * size : start * size])
        elif isinstance(node.parent, Node):
            parent_digest = bytes(node.parent.digests[-size:])
        else:
            parent_digest = self._hasher.root
        return self._hasher.chain(
            BlockHash(parent_digest),
            bytes(node.tokens[start * self._block_bytes : end * self._block_bytes]),
            self._extra_keys(node, start=start, end=end),
        )

    def _extra_keys(self, node: Node, *, start: int, end: int) -> list[ExtraKeys]:
        root_key = node.root.root_key
        later_keys = root_key.extra_keys((), is_first_block=False)
        extra_keys = [later_keys] * (end - start)
        for offset, varied_keys in node.varied_keys.items():
            if start <= offset < end:
                extra_keys[offset - start] = root_key.extra_keys(varied_keys, is_first_block=False)
        if start == 0 and isinstance(node.parent, Root):
            extra_keys[0] = root_key.extra_keys(node.varied_keys.get(0, ()), is_first_block=True)
        return extra_keys
