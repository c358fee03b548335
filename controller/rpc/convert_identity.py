"""Prefix identities: protobuf to core and back."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from prefixd.controller.core.messages import Identity, LoraAdapter, MultimodalItem
from prefixd.v1 import types_pb2

IDENTITY_NONE = Identity()
"""The identity of a sequence that states none; shared, as identities are immutable."""


def identity_value(message: types_pb2.Identity) -> Identity:
    """Converts an identity; fields unknown at any depth make the sequence uncacheable (S5)."""
    lora = None
    if message.HasField("lora"):
        lora = LoraAdapter(
            name=message.lora.name, path=message.lora.path, version=message.lora.version
        )
    return Identity(
        lora=lora,
        multimodal_items=tuple(
            MultimodalItem(
                identifier=item.identifier, offset=item.offset, token_count=item.token_count
            )
            for item in message.multimodal_items
        ),
        cache_salt=message.cache_salt,
        prompt_embeds_digests=tuple(message.prompt_embeds_digests),
        has_unknown_fields=_has_unknown_fields(message),
    )


def identity_message(identity: Identity) -> types_pb2.Identity:
    """Converts an identity back, for inspection."""
    message = types_pb2.Identity(
        multimodal_items=[
            types_pb2.MultimodalItem(
                identifier=item.identifier, offset=item.offset, token_count=item.token_count
            )
            for item in identity.multimodal_items
        ],
        cache_salt=identity.cache_salt,
        prompt_embeds_digests=identity.prompt_embeds_digests,
    )
    if identity.lora is not None:
        message.lora.CopyFrom(
            types_pb2.LoraAdapter(
                name=identity.lora.name, path=identity.lora.path, version=identity.lora.version
            )
        )
    return message


def _has_unknown_fields(message: types_pb2.Identity) -> bool:
    if _is_unknown_inside(message):
        return True
    if message.HasField("lora") and _is_unknown_inside(message.lora):
        return True
    return any(_is_unknown_inside(item) for item in message.multimodal_items)


def _is_unknown_inside(message: Message) -> bool:
    return len(UnknownFieldSet(message)) > 0
