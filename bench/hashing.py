"""Digests of blocks without a pool: each algorithm against the libraries called plainly."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import cbor2
import xxhash

from bench.figures import Figure
from bench.measure import Timed, in_turns, ratio_of
from bench.prompts import BLOCK_SIZE, PROMPT_TOKEN_COUNT, Prompts
from prefixd.controller.core.hashing import HASHES, Hasher
from prefixd.controller.core.messages import TokenArray

ROUNDS = 40


def canonical_cbor(value: Any) -> bytes:
    """Serialises a block with cbor2."""
    return cbor2.dumps(value, canonical=True)


def pickled(value: Any) -> bytes:
    """Serialises a block with pickle."""
    return pickle.dumps(value, protocol=5)


def sha256(data: bytes) -> bytes:
    """Hashes with hashlib."""
    return hashlib.sha256(data).digest()


LIBRARIES: dict[str, tuple[str, Callable[[Any], bytes], Callable[[bytes], bytes]]] = {
    "sha256_cbor": ("cbor2 + hashlib", canonical_cbor, sha256),
    "sha256": ("pickle + hashlib", pickled, sha256),
    "xxhash_cbor": ("cbor2 + xxhash", canonical_cbor, xxhash.xxh3_128_digest),
    "xxhash": ("pickle + xxhash", pickled, xxhash.xxh3_128_digest),
}
"""How the libraries alone compute each algorithm."""


def library_chain(algorithm: str, token_ids: TokenArray) -> bytes:
    """Computes the digests of a prompt's blocks with the libraries; returns the last."""
    _, serialise, digest = LIBRARIES[algorithm]
    parent = digest(serialise("0"))
    tokens = token_ids.tolist()
    for start in range(0, len(tokens), BLOCK_SIZE):
        parent = digest(serialise((parent, tuple(tokens[start : start + BLOCK_SIZE]), None)))
    return parent


def core_chain(hasher: Hasher, token_ids: TokenArray) -> bytes:
    """Computes the digests of a prompt's blocks with the core; returns the last."""
    extra_keys = [()] * (len(token_ids) // BLOCK_SIZE)
    digests = hasher.chain(hasher.root, token_ids.tobytes(), extra_keys)
    return digests[-len(hasher.root) :]


def hashing_figures() -> list[Figure]:
    """Measures every algorithm on the blocks of a long prompt."""
    return [figure_of(algorithm) for algorithm in HASHES]


def figure_of(algorithm: str) -> Figure:
    """Measures one algorithm; both sides must come to the same digest."""
    hasher = Hasher(algorithm, seed="0")
    token_ids = Prompts(seed=5).next()
    assert core_chain(hasher, token_ids) == library_chain(algorithm, token_ids)
    samples = in_turns(
        {
            "core": Timed(lambda: core_chain(hasher, token_ids)),
            "libraries": Timed(lambda: library_chain(algorithm, token_ids)),
        },
        round_count=ROUNDS,
        warm_up_count=3,
    )
    return Figure(
        name=f"hashing: {PROMPT_TOKEN_COUNT // BLOCK_SIZE} blocks, {algorithm}",
        value=samples["core"].median_us,
        unit="us",
        baseline=LIBRARIES[algorithm][0],
        baseline_value=samples["libraries"].median_us,
        ratio=ratio_of(samples["core"], samples["libraries"]),
    )
