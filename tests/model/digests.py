"""Block digests written down once more, straight from the rules, on pickle, cbor2 and hashlib.

Nothing here comes from the controller: a digest that agrees was computed twice.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence

import cbor2
import xxhash

from prefixd.controller.core.messages import Identity

ExtraKeys = tuple[tuple[object, ...], ...] | None
"""Tagged extra keys of one block, None where it has none."""


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _canonical_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


ALGORITHMS: dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (_canonical_cbor, _sha256),
    "xxhash": (_pickled, _xxh3_128),
    "xxhash_cbor": (_canonical_cbor, _xxh3_128),
}
"""How each algorithm serialises a block, and how it hashes the bytes."""


def root_preimage(algorithm: str, *, seed: str) -> bytes:
    """Returns the bytes whose digest is the root."""
    serialise, _ = ALGORITHMS[algorithm]
    return serialise(seed)


def root_digest(algorithm: str, *, seed: str) -> bytes:
    """Returns the digest that every chain starts from."""
    _, digest = ALGORITHMS[algorithm]
    return digest(root_preimage(algorithm, seed=seed))


def block_preimage(
    algorithm: str, *, parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys
) -> bytes:
    """Returns the bytes whose digest is the block's."""
    serialise, _ = ALGORITHMS[algorithm]
    return serialise((parent, tuple(token_ids), extra_keys))


def block_digest(
    algorithm: str, *, parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys
) -> bytes:
    """Returns H(parent, tokens, extra keys)."""
    _, digest = ALGORITHMS[algorithm]
    return digest(
        block_preimage(algorithm, parent=parent, token_ids=token_ids, extra_keys=extra_keys)
    )


def extra_keys(
    identity: Identity, *, block_index: int, block_size: int, model_version: str = ""
) -> ExtraKeys:
    """Returns the tagged extra keys of one block, in their order (S2, S4)."""
    start = block_index * block_size
    end = start + block_size
    keys: list[tuple[object, ...]] = []
    if identity.lora is not None:
        keys.append(("lora", identity.lora.name, identity.lora.path))
    for item in identity.multimodal_items:
        if item.offset < end and item.offset + item.token_count > start:
            keys.append(("mm", item.identifier, item.offset - start))
    if block_index == 0 and identity.cache_salt:
        keys.append(("cache_salt", identity.cache_salt))
    if block_index < len(identity.prompt_embeds_digests):
        keys.append(("prompt_embeds", identity.prompt_embeds_digests[block_index]))
    if identity.lora is not None and identity.lora.version:
        keys.append(("lora_version", identity.lora.version))
    if model_version:
        keys.append(("model_version", model_version))
    return tuple(keys) or None
