"""From an identity to extra keys (rules S2, S4).

Keys of the whole sequence choose a root of the index; only keys that differ from block to block
(multimodal items, prompt embeddings) stand beside the tokens of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prefixd.controller.core.hashing import ExtraKey, ExtraKeys
from prefixd.controller.core.messages import Identity


@dataclass(frozen=True, slots=True)
class RootKey:
    """The extra keys that every block of a sequence shares; the salt stands in block 0 only."""

    lora_keys: ExtraKeys = ()
    salt_keys: ExtraKeys = ()
    version_keys: ExtraKeys = ()

    def extra_keys(self, varied_keys: ExtraKeys, *, is_first_block: bool) -> ExtraKeys:
        """Return all extra keys of one block, in the order of rule S2."""
        if not varied_keys:
            salt_keys = self.salt_keys if is_first_block else ()
            return self.lora_keys + salt_keys + self.version_keys
        item_keys = tuple(key for key in varied_keys if key[0] == "mm")
        embeds_keys = varied_keys[len(item_keys) :]
        salt_keys = self.salt_keys if is_first_block else ()
        return self.lora_keys + item_keys + salt_keys + embeds_keys + self.version_keys


@dataclass(frozen=True, slots=True)
class SequenceKeys:
    """The extra keys of one sequence; `varied_keys` by block index, absent where a block has none.

    `varied_keys` are ordered multimodal items first, then the prompt-embeds digest.
    """

    root_key: RootKey
    varied_keys: Mapping[int, ExtraKeys]


def sequence_keys(identity: Identity, *, model_version: str, block_size: int) -> SequenceKeys:
    """Return the extra keys of a sequence under a version of the model's weights."""
    return SequenceKeys(_root_key(identity, model_version), _varied_keys(identity, block_size))


def _root_key(identity: Identity, model_version: str) -> RootKey:
    lora_keys: ExtraKeys = ()
    version_keys: ExtraKeys = ()
    if identity.lora is not None:
        lora_keys = (("lora", identity.lora.name, identity.lora.path),)
        if identity.lora.version:
            version_keys = (("lora_version", identity.lora.version),)
    if model_version:
        version_keys += (("model_version", model_version),)
    salt_keys: ExtraKeys = ()
    if identity.cache_salt:
        salt_keys = (("cache_salt", identity.cache_salt),)
    return RootKey(lora_keys, salt_keys, version_keys)


def _varied_keys(identity: Identity, block_size: int) -> Mapping[int, ExtraKeys]:
    keys: dict[int, list[ExtraKey]] = {}
    for item in identity.multimodal_items:
        first_block = item.offset // block_size
        end_block = (item.offset + item.token_count - 1) // block_size + 1
        for block_index in range(first_block, end_block):
            key = ("mm", item.identifier, item.offset - block_index * block_size)
            keys.setdefault(block_index, []).append(key)
    for block_index, digest in enumerate(identity.prompt_embeds_digests):
        keys.setdefault(block_index, []).append(("prompt_embeds", bytes(digest)))
    return {block_index: tuple(block_keys) for block_index, block_keys in keys.items()}
