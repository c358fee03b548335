"""Computing the digests of indexed blocks, in slices or when they are read."""

from prefixd.controller.core.hashing import Hasher
from prefixd.controller.core.index import PrefixIndex
from prefixd.controller.core.messages import BlockHash
from prefixd.controller.core.node import Node, Root


class DigestWork:
    """Fills in the digests that matching and allocation did not need.

    Invariant: the digests of a node are a prefix of its blocks, and a node has some only where its
    parent has all.
    """

    def __init__(self, index: PrefixIndex, hasher: Hasher) -> None:
        self._index = index
        self._hasher = hasher

    def hash_slice(self, block_count_max: int) -> bool:
        """Compute up to that many missing digests; True while some are left."""
        unhashed = self._index.unhashed
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
        size = self._index.digest_size
        while len(node.digests) < (offset + 1) * size:
            self._hash(self._topmost(node), node.block_count + offset + 1)
        return BlockHash(bytes(node.digests[offset * size : (offset + 1) * size]))

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
            if node in self._index.unhashed:
                topmost = node
        return topmost

    def _hash(self, node: Node, block_count_max: int) -> int:
        index = self._index
        start = len(node.digests) // index.digest_size
        end = min(node.block_count, start + block_count_max)
        root = node
        is_at_root = isinstance(node.parent, Root)
        while isinstance(root.parent, Node):
            root = root.parent
        assert isinstance(root.parent, Root)
        root_key = root.parent.root_key
        if start > 0:
            parent = BlockHash(bytes(node.digests[-index.digest_size :]))
        elif isinstance(node.parent, Node):
            parent = BlockHash(bytes(node.parent.digests[-index.digest_size :]))
        else:
            parent = self._hasher.root
        node.digests += self._hasher.chain(
            parent,
            bytes(node.tokens[start * index.block_bytes : end * index.block_bytes]),
            [
                root_key.extra_keys(
                    node.varied_keys.get(offset, ()),
                    is_first_block=is_at_root and offset == 0,
                )
                for offset in range(start, end)
            ],
        )
        if end == node.block_count:
            del index.unhashed[node]
        return end - start
