"""Digests, serialisations and seeds (S1, S2)."""

import hashlib
import pickle
import random

import cbor2
import pytest
import xxhash

from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.hashing import (
    HASHES,
    ExtraKeys,
    Hasher,
    choose_seed,
    group_key,
)

EXTRA_KEYS: list[ExtraKeys] = [
    (),
    (("cache_salt", "tenant"),),
    (("lora", "sql", "/sql"), ("mm", "cat", -3), ("mm", "cat", 2), ("cache_salt", "ü")),
    (("prompt_embeds", b"\x00" * 32),),
]


def reference(algorithm: str, value: object) -> bytes:
    """Computes a digest with the libraries alone."""
    if algorithm.endswith("_cbor"):
        data = cbor2.dumps(value, canonical=True)
    else:
        data = pickle.dumps(value, protocol=5)
    if algorithm.startswith("sha256"):
        return hashlib.sha256(data).digest()
    return xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize("algorithm", sorted(HASHES))
def test_s1_a_digest_covers_parent_tokens_and_extra_keys(algorithm: str) -> None:
    """H((parent, token ids, extra keys or null)), with the root H(seed)."""
    hasher = Hasher(algorithm, seed="0")
    assert hasher.root == reference(algorithm, "0")
    token_ids = (0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1)
    assert hasher.block_hash(hasher.root, token_ids) == reference(
        algorithm, (hasher.root, token_ids, None)
    )


@pytest.mark.parametrize("algorithm", sorted(HASHES))
@pytest.mark.parametrize("block_size", [1, 3, 16, 23, 24, 255, 256, 300])
def test_s1_a_chain_of_many_blocks_equals_single_blocks(algorithm: str, block_size: int) -> None:
    """Tokens of every encoded length, with and without extra keys, in short and long chains."""
    chance = random.Random(block_size)
    hasher = Hasher(algorithm, seed="0")
    for block_count in (1, 15, 16, 40):
        token_ids = [
            chance.randrange(2 ** chance.randint(1, 32)) for _ in range(block_count * block_size)
        ]
        extra_keys = [chance.choice(EXTRA_KEYS) for _ in range(block_count)]
        packed = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
        parent, digests = hasher.root, b""
        for index, keys in enumerate(extra_keys):
            block = token_ids[index * block_size : (index + 1) * block_size]
            parent = hasher.block_hash(parent, block, keys)
            digests += parent
        assert hasher.chain(hasher.root, packed, extra_keys) == digests


def test_s1_pickle_digests_do_not_depend_on_which_strings_are_one_object() -> None:
    """A name equal to its path gives one digest, whether they are one object or two."""
    hasher = Hasher("sha256", seed="0")
    name = "adapter-7"
    twin = "".join(["adapter", "-7"])
    assert name is not twin
    one = hasher.block_hash(hasher.root, (1,), (("lora", name, name),))
    two = hasher.block_hash(hasher.root, (1,), (("lora", name, twin),))
    assert one == two
    assert hasher.block_hash(hasher.root, (1,), (("lora", "lora", "mm"),)) == hasher.block_hash(
        hasher.root, (1,), (("lora", "".join(["lo", "ra"]), "mm"),)
    )


def test_s1_the_seed_is_the_option_then_the_environment_then_the_rule() -> None:
    """PYTHONHASHSEED counts verbatim; without it only the cryptographic ones agree."""
    chance = bytes(range(32))

    def choose(algorithm: str, option: str | None, environment: str | None) -> tuple[str, bool]:
        seed = choose_seed(algorithm, option=option, environment=environment, random_bytes=chance)
        return seed.text, seed.is_random

    assert choose("xxhash", "mine", "0") == ("mine", False)
    assert choose("xxhash", None, "random") == ("random", False)
    assert choose("sha256", None, "") == ("", False)
    assert choose("sha256_cbor", None, None) == ("vllm-none-hash", False)
    assert choose("xxhash_cbor", None, None) == (chance.hex(), True)


def test_an_unknown_algorithm_is_refused() -> None:
    """The error names the field and the algorithms there are."""
    with pytest.raises(FieldInvalid, match="sha256_cbor") as caught:
        Hasher("md5", seed="0")
    assert caught.value.field == "hash_algorithm"


def test_a_group_key_is_digest_and_group() -> None:
    """Four big-endian bytes, so that groups never share a key."""
    hasher = Hasher("sha256_cbor", seed="0")
    assert group_key(hasher.root, group_index=258) == hasher.root + b"\x00\x00\x01\x02"
