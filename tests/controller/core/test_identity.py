"""From an identity to extra keys (S2)."""

from prefixd.controller.core.identity import sequence_keys
from prefixd.controller.core.messages import Identity, LoraAdapter, MultimodalItem


def extra_keys(identity: Identity, block_count: int, version: str = "") -> list[object]:
    """Returns the extra keys of the first blocks of four tokens."""
    keys = sequence_keys(identity, model_version=version, block_size=4)
    return [
        keys.root_key.extra_keys(
            keys.varied_keys.get(block_index, ()), is_first_block=block_index == 0
        )
        for block_index in range(block_count)
    ]


def test_s2_no_identity_gives_no_keys() -> None:
    """Token-only digests are those of every other implementation."""
    assert extra_keys(Identity(), 2) == [(), ()]


def test_s2_lora_stands_in_every_block_and_the_salt_in_the_first() -> None:
    """In that order, tagged."""
    identity = Identity(lora=LoraAdapter("sql", "/sql"), cache_salt="tenant")
    assert extra_keys(identity, 2) == [
        (("lora", "sql", "/sql"), ("cache_salt", "tenant")),
        (("lora", "sql", "/sql"),),
    ]


def test_s2_items_stand_in_the_blocks_they_overlap() -> None:
    """With their offset relative to the block, negative where they began before it."""
    identity = Identity(multimodal_items=(MultimodalItem("cat", 2, 6), MultimodalItem("dog", 8, 1)))
    assert extra_keys(identity, 4) == [
        (("mm", "cat", 2),),
        (("mm", "cat", -2),),
        (("mm", "dog", 0),),
        (),
    ]


def test_s2_keys_of_one_block_are_ordered() -> None:
    """LoRA, items by offset, salt, embeddings, versions last."""
    identity = Identity(
        lora=LoraAdapter("sql", "/sql", version="3"),
        multimodal_items=(MultimodalItem("cat", 0, 1), MultimodalItem("dog", 1, 1)),
        cache_salt="tenant",
        prompt_embeds_digests=(b"\x01" * 32,),
    )
    assert extra_keys(identity, 1, version="9") == [
        (
            ("lora", "sql", "/sql"),
            ("mm", "cat", 0),
            ("mm", "dog", 1),
            ("cache_salt", "tenant"),
            ("prompt_embeds", b"\x01" * 32),
            ("lora_version", "3"),
            ("model_version", "9"),
        )
    ]


def test_s2_a_salt_never_equals_a_lora_name() -> None:
    """Tags keep them apart."""
    salted = extra_keys(Identity(cache_salt="sql"), 1)
    adapted = extra_keys(Identity(lora=LoraAdapter("sql")), 1)
    assert salted != adapted
