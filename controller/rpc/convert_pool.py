"""Pool descriptions and durations: protobuf to core and back."""

from google.protobuf.duration_pb2 import Duration

from prefixd.controller.core.errors import FieldInvalid
from prefixd.controller.core.limits import BLOCK_SIZE_DEFAULT
from prefixd.controller.core.messages import GroupKind, GroupSpec, PoolSpec
from prefixd.v1 import pool_pb2, types_pb2

GROUP_KINDS = {
    types_pb2.KV_GROUP_KIND_FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    types_pb2.KV_GROUP_KIND_SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    types_pb2.KV_GROUP_KIND_STATE_SPACE: GroupKind.STATE_SPACE,
}
KIND_VALUES = {kind: value for value, kind in GROUP_KINDS.items()}


def pool_spec_value(request: pool_pb2.RegisterPoolRequest) -> PoolSpec:
    """Converts a registration, with the defaults of its absent fields. Raises FieldInvalid."""
    groups = tuple(_group_value(group, index) for index, group in enumerate(request.groups))
    return PoolSpec(
        pool_name=request.pool_name,
        block_count=request.block_count,
        block_size=request.block_size or BLOCK_SIZE_DEFAULT,
        model_name=request.model_name,
        model_version=request.model_version,
        groups=groups or (GroupSpec(),),
        kv_format=request.kv_format,
        vocabulary_size=request.vocabulary_size,
        caching_disabled=request.caching_disabled,
        sub_block_reuse=request.sub_block_reuse,
        merge_duplicates=request.merge_duplicates,
        lease_ms=duration_ms(request.lease) if request.HasField("lease") else None,
        worker_address=request.worker_address,
        eviction_policy=request.eviction_policy,
    )


def group_message(group: GroupSpec) -> types_pb2.KvGroup:
    """Converts a KV group back."""
    return types_pb2.KvGroup(
        kind=KIND_VALUES[group.kind],
        window_token_count=group.window_token_count,
        layer_count=group.layer_count,
    )


def duration_ms(duration: Duration) -> int:
    """Converts a duration to whole milliseconds, rounded down."""
    return duration.seconds * 1_000 + duration.nanos // 1_000_000


def duration_message(milliseconds: int) -> Duration:
    """Converts milliseconds to a duration."""
    seconds, rest = divmod(milliseconds, 1_000)
    return Duration(seconds=seconds, nanos=rest * 1_000_000)


def _group_value(group: types_pb2.KvGroup, index: int) -> GroupSpec:
    kind = GROUP_KINDS.get(group.kind)
    if kind is None:
        field = f"groups[{index}].kind"
        raise FieldInvalid(f"{field} must be a known kind, not {group.kind}", field=field)
    return GroupSpec(
        kind=kind,
        window_token_count=group.window_token_count,
        layer_count=group.layer_count,
    )
