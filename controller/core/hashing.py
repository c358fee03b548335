"""Block digests: four algorithms, byte-identical to vLLM 0.33 (rule S1).

A block's digest is H((parent digest, token ids, extra keys)) over one of two serialisations, pickle
or canonical CBOR. The root of every chain is H(seed string). A digest is a public name for content;
matching never relies on it (S3).
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import cbor2
import xxhash

from prefixd.controller.core.cbor_blocks import encode_contents, encode_parent_head
from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.messages import BlockHash

ExtraKey = tuple[str | bytes | int, ...]
"""One tagged extra key, for instance ("cache_salt", "tenant-7")."""
ExtraKeys = tuple[ExtraKey, ...]
"""All extra keys of one block, in the order of rule S2; empty where it has none."""

_TAGS: dict[str | bytes | int, str] = {
    tag: tag
    for tag in ("lora", "mm", "cache_salt", "prompt_embeds", "lora_version", "model_version")
}
# Every tag of an extra key, with the one object that stands for it in a pickle.
SEED_DETERMINISTIC = "vllm-none-hash"
"""Seed of the cryptographic algorithms where nobody names one, so that replicas agree."""

_VECTORISED_BLOCKS_MIN = 16
# Below this many blocks the numpy calls cost more than they save.


class Hashed(Protocol):
    """Bytes that were hashed."""

    def digest(self) -> bytes:
        """Return their digest."""


def _pickled(parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys) -> bytes:
    # Pickle writes a string that it met before as a reference to the first one, so the bytes depend
    # on which equal strings are one object. As in vLLM tags are one object, values never are.
    keys = tuple((_TAGS[tag], *map(_own, values)) for tag, *values in extra_keys)
    return pickle.dumps((parent, token_ids, keys or None), protocol=5)


def _own(value: str | bytes | int) -> str | bytes | int:
    return value.encode().decode() if isinstance(value, str) else value


def _cbor(parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys) -> bytes:
    return cbor2.dumps((parent, token_ids, extra_keys or None), canonical=True)


def _pickled_seed(seed: str) -> bytes:
    return pickle.dumps(seed, protocol=5)


def _cbor_seed(seed: str) -> bytes:
    return cbor2.dumps(seed, canonical=True)


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """A digest function over a serialisation of (parent, token ids, extra keys)."""

    name: str
    hashed: Callable[[bytes], Hashed]
    serialise_seed: Callable[[str], bytes]
    serialise_block: Callable[[bytes, tuple[int, ...], ExtraKeys], bytes]
    digest_size: int
    is_cryptographic: bool
    is_cbor: bool

    def digest(self, data: bytes) -> bytes:
        """Return the digest of some bytes."""
        return self.hashed(data).digest()


HASHES: dict[str, HashAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        HashAlgorithm("sha256_cbor", hashlib.sha256, _cbor_seed, _cbor, 32, True, True),
        HashAlgorithm("sha256", hashlib.sha256, _pickled_seed, _pickled, 32, True, False),
        HashAlgorithm("xxhash_cbor", xxhash.xxh3_128, _cbor_seed, _cbor, 16, False, True),
        HashAlgorithm("xxhash", xxhash.xxh3_128, _pickled_seed, _pickled, 16, False, False),
    )
}
"""All algorithms by name; the first one is the default."""


@dataclass(frozen=True, slots=True)
class Seed:
    """The string that the root digest is made from; `is_random`: it differs between processes."""

    text: str
    is_random: bool


def choose_seed(
    algorithm_name: str, *, option: str | None, environment: str | None, random_bytes: bytes
) -> Seed:
    """Choose the hash seed (S1): the option, else PYTHONHASHSEED, else vLLM's rule.

    `environment` is the value of PYTHONHASHSEED, None where the variable does not exist; it counts
    verbatim ("" and "random" are seeds too). `random_bytes` (32 bytes) serve the algorithms that
    are not cryptographic.
    """
    if option is not None:
        return Seed(option, is_random=False)
    if environment is not None:
        return Seed(environment, is_random=False)
    if HASHES[algorithm_name].is_cryptographic:
        return Seed(SEED_DETERMINISTIC, is_random=False)
    return Seed(random_bytes.hex(), is_random=True)


class Hasher:
    """Computes block digests under one algorithm and one root.

    Raises FieldInvalid (field "hash_algorithm") where the algorithm is not known.
    """

    def __init__(self, algorithm_name: str, *, seed: str) -> None:
        if algorithm_name not in HASHES:
            raise FieldInvalid(
                f"hash algorithm {algorithm_name!r} is not one of {', '.join(HASHES)}",
                field="hash_algorithm",
            )
        self.algorithm = HASHES[algorithm_name]
        self.root = BlockHash(self.algorithm.digest(self.algorithm.serialise_seed(seed)))

    def preimage(self, parent: BlockHash, token_ids: Sequence[int], extra_keys: ExtraKeys) -> bytes:
        """Return the bytes that the digest of one block is taken of."""
        return self.algorithm.serialise_block(parent, tuple(token_ids), extra_keys)

    def block_hash(
        self, parent: BlockHash, token_ids: Sequence[int], extra_keys: ExtraKeys = ()
    ) -> BlockHash:
        """Return the digest of one block; `parent` is the root for a sequence's first block."""
        return BlockHash(self.algorithm.digest(self.preimage(parent, token_ids, extra_keys)))

    def chain(
        self, parent: BlockHash, packed_tokens: bytes, extra_keys: Sequence[ExtraKeys]
    ) -> bytes:
        """Return the packed digests of consecutive blocks behind `parent`.

        `packed_tokens` has four little-endian bytes per token; there is one item of `extra_keys`
        per block.
        """
        block_count = len(extra_keys)
        if self.algorithm.is_cbor and block_count >= _VECTORISED_BLOCKS_MIN:
            return self._cbor_chain(parent, packed_tokens, extra_keys)
        token_ids = memoryview(packed_tokens).cast("I").tolist()
        block_size = len(token_ids) // block_count
        digests = []
        for index, keys in enumerate(extra_keys):
            begin = index * block_size
            parent = self.block_hash(parent, token_ids[begin : begin + block_size], keys)
            digests.append(parent)
        return b"".join(digests)

    def _cbor_chain(
        self, parent: BlockHash, packed_tokens: bytes, extra_keys: Sequence[ExtraKeys]
    ) -> bytes:
        hashed = self.algorithm.hashed
        head = encode_parent_head(self.algorithm.digest_size)
        link: bytes = parent
        digests = []
        for content in encode_contents(packed_tokens, extra_keys):
            link = hashed(head + link + content).digest()
            digests.append(link)
        return b"".join(digests)


def group_key(block_hash: BlockHash, *, group_index: int) -> bytes:
    """Return the index key of a block in one KV group: digest, then four big-endian bytes."""
    return block_hash + group_index.to_bytes(4, "big")
