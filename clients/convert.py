"""Protobuf messages of the controller as the clients' values."""

from datetime import UTC
from enum import StrEnum
from typing import TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration

from prefixd.clients import results
from prefixd.v1 import cache_pb2, inspect_pb2, types_pb2

NameT = TypeVar("NameT", bound=StrEnum)


def server_info(message: inspect_pb2.GetServerInfoResponse) -> results.ServerInfo:
    """A controller's description."""
    return results.ServerInfo(
        version=message.version,
        hash_algorithm=message.hash_algorithm,
        root_hash_hex=message.root_hash_hex,
        start_time=message.start_time.ToDatetime(tzinfo=UTC),
        pool_count=message.pool_count,
        limits=dict(message.limits),
        hash_algorithms=tuple(message.hash_algorithms),
        eviction_policy=message.eviction_policy,
        eviction_policies=tuple(message.eviction_policies),
    )


def pool(message: inspect_pb2.Pool) -> results.Pool:
    """A pool and its accounts."""
    return results.Pool(
        pool_name=message.pool_name,
        model_name=message.model_name,
        model_version=message.model_version,
        epoch=message.epoch,
        revision=message.revision,
        block_count=message.block_count,
        block_size=message.block_size,
        free_block_count=message.free_block_count,
        evictable_block_count=message.evictable_block_count,
        held_block_count=message.held_block_count,
        published_block_count=message.published_block_count,
        pending_block_count=message.pending_block_count,
        sequence_count=message.sequence_count,
        applied_step_id=message.applied_step_id,
        executed_step_id=message.executed_step_id,
        groups=tuple(_kv_group(group) for group in message.groups),
        statistics=_statistics(message.statistics),
        session_active=message.session_active,
        draining=message.draining,
        caching_disabled=message.caching_disabled,
        lease_ms=duration_ms(message.lease),
        lease_left_ms=duration_ms(message.lease_left) if message.HasField("lease_left") else None,
        kv_format=message.kv_format,
        worker_address=message.worker_address,
        vocabulary_size=message.vocabulary_size,
        eviction_policy=message.eviction_policy,
    )


def sequence(message: inspect_pb2.Sequence) -> results.Sequence:
    """An open sequence."""
    return results.Sequence(
        sequence_id=message.sequence_id,
        handle=message.handle,
        known_count=message.known_count,
        scheduled_count=message.scheduled_count,
        written_count=message.written_count,
        cached_count=message.cached_count,
        block_count=message.block_count,
        identity=_identity(message.identity),
        preemption_count=message.preemption_count,
        uncacheable=message.uncacheable,
        recomputed_token_count=message.recomputed_token_count,
        model_version=message.model_version,
        cut=message.cut,
    )


def sequence_tables(message: inspect_pb2.GetSequenceResponse) -> results.SequenceTables:
    """A sequence with its block tables."""
    return results.SequenceTables(
        sequence=sequence(message.sequence),
        tables=tuple(results.BlockTable(tuple(table.block_ids)) for table in message.tables),
        revision=message.revision,
    )


def block(message: inspect_pb2.Block) -> results.Block:
    """A block."""
    return results.Block(
        block_id=message.block_id,
        state=named(results.BlockState, inspect_pb2.BlockState.DESCRIPTOR, message.state),
        content=named(results.BlockContent, inspect_pb2.BlockContent.DESCRIPTOR, message.content),
        holder_count=message.holder_count,
        hash_hex=message.hash_hex,
        parent_hash_hex=message.parent_hash_hex,
        block_index=message.block_index,
        group_index=message.group_index,
    )


def block_holders(message: inspect_pb2.GetBlockResponse) -> results.BlockHolders:
    """A block and who holds it."""
    return results.BlockHolders(
        block=block(message.block),
        sequence_ids=tuple(message.sequence_ids),
        revision=message.revision,
    )


def free_order(message: inspect_pb2.ListFreeBlocksResponse) -> results.FreeOrder:
    """The free order."""
    return results.FreeOrder(block_ids=tuple(message.block_ids), revision=message.revision)


def prefix_match(message: cache_pb2.MatchPrefixResponse) -> results.PrefixMatch:
    """How much of a prompt is cached."""
    return results.PrefixMatch(
        published_token_count=message.published_token_count,
        pending_token_count=message.pending_token_count,
        epoch=message.epoch,
    )


def identity_message(identity: results.Identity) -> types_pb2.Identity:
    """An identity as it travels."""
    message = types_pb2.Identity(
        multimodal_items=[
            types_pb2.MultimodalItem(
                identifier=item.identifier, offset=item.offset, token_count=item.token_count
            )
            for item in identity.multimodal_items
        ],
        cache_salt=identity.cache_salt,
        prompt_embeds_digests=[bytes.fromhex(text) for text in identity.prompt_embeds_digests],
    )
    if identity.lora is not None:
        message.lora.name = identity.lora.name
        message.lora.path = identity.lora.path
        message.lora.version = identity.lora.version
    return message


def duration_ms(duration: Duration) -> int:
    """A span in whole milliseconds."""
    return duration.ToMilliseconds()


def named(names: type[NameT], enum: EnumDescriptor, number: int) -> NameT:
    """The name of an enum's number; UNKNOWN for a number that this client is too old to know."""
    value = enum.values_by_number.get(number)
    if value is None:
        return names["UNKNOWN"]
    # An enum's values share a prefix: what stands before UNSPECIFIED in the zero value.
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return names.__members__.get(value.name.removeprefix(prefix), names["UNKNOWN"])


def _kv_group(message: types_pb2.KvGroup) -> results.KvGroup:
    return results.KvGroup(
        kind=named(results.KvGroupKind, types_pb2.KvGroupKind.DESCRIPTOR, message.kind),
        window_token_count=message.window_token_count,
        layer_count=message.layer_count,
    )


def _statistics(message: inspect_pb2.PoolStatistics) -> results.PoolStatistics:
    return results.PoolStatistics(
        sequence_count=message.sequence_count,
        query_token_count=message.query_token_count,
        hit_token_count=message.hit_token_count,
        preempted_sequence_count=message.preempted_sequence_count,
        preempted_query_token_count=message.preempted_query_token_count,
        preempted_hit_token_count=message.preempted_hit_token_count,
        recent_hit_rate=message.recent_hit_rate,
        evicted_block_count=message.evicted_block_count,
        recomputed_token_count=message.recomputed_token_count,
        usage=message.usage,
        age_at_eviction=_age_histogram(message.age_at_eviction),
        age_at_hit=_age_histogram(message.age_at_hit),
    )


def _age_histogram(message: inspect_pb2.AgeHistogram) -> results.AgeHistogram:
    return results.AgeHistogram(
        upper_bounds_ms=tuple(message.upper_bounds_ms), block_counts=tuple(message.block_counts)
    )


def lora_value(message: types_pb2.LoraAdapter) -> results.LoraAdapter:
    """A LoRA adapter as a value."""
    return results.LoraAdapter(name=message.name, path=message.path, version=message.version)


def _identity(message: types_pb2.Identity) -> results.Identity:
    lora = None
    if message.HasField("lora"):
        lora = lora_value(message.lora)
    return results.Identity(
        lora=lora,
        multimodal_items=tuple(
            results.MultimodalItem(
                identifier=item.identifier, offset=item.offset, token_count=item.token_count
            )
            for item in message.multimodal_items
        ),
        cache_salt=message.cache_salt,
        prompt_embeds_digests=tuple(digest.hex() for digest in message.prompt_embeds_digests),
    )
