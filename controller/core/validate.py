"""What a message alone shows: ranges, signs, lengths, duplicates.

Everything here raises FieldInvalid, TokenIdInvalid, PromptEmpty or Unsupported and reads no state.
"""

import re

from prefixd.controller.core import limits
from prefixd.controller.core.errors import FieldInvalid, Unsupported
from prefixd.controller.core.messages import GroupKind, PoolSpec
from prefixd.controller.core.policies.registry import EVICTION_POLICIES

_POOL_NAME = re.compile(rf"[A-Za-z0-9._/-]{{1,{limits.POOL_NAME_LENGTH_MAX}}}")


def count_in_range(value: int, *, low: int, high: int, field: str) -> None:
    """Raise FieldInvalid unless low <= value <= high."""
    if not low <= value <= high:
        raise FieldInvalid(
            f"{field} is {value}, not in {low}..{high}",
            numbers={"value": value, "low": low, "high": high},
            field=field,
        )


def length_at_most(text: str, *, length_max: int, field: str) -> None:
    """Raise FieldInvalid where a text is longer than length_max characters."""
    if len(text) > length_max:
        raise FieldInvalid(
            f"{field} has {len(text)} characters, more than {length_max}",
            numbers={"length": len(text), "length_max": length_max},
            field=field,
        )


def model_version(version: str) -> None:
    """Check the length of a version of the weights."""
    length_at_most(version, length_max=limits.IDENTIFIER_LENGTH_MAX, field="model_version")


def eviction_policy(name: str) -> None:
    """Check that an eviction policy of this name is registered."""
    if name not in EVICTION_POLICIES:
        raise FieldInvalid(
            f"eviction_policy is {name!r}, not one of {', '.join(EVICTION_POLICIES)}",
            field="eviction_policy",
        )


def pool_spec(spec: PoolSpec) -> None:
    """Check what a driver registers."""
    if not _POOL_NAME.fullmatch(spec.pool_name):
        raise FieldInvalid(
            f"pool_name must be 1 to {limits.POOL_NAME_LENGTH_MAX} characters out of letters,"
            " digits, '.', '_', '-', '/'",
            numbers={"length_max": limits.POOL_NAME_LENGTH_MAX},
            field="pool_name",
        )
    count_in_range(spec.block_size, low=1, high=limits.BLOCK_SIZE_MAX, field="block_size")
    block_count_max = min(limits.BLOCK_COUNT_MAX, limits.SLOT_COUNT_MAX // spec.block_size)
    count_in_range(spec.block_count, low=2, high=block_count_max, field="block_count")
    count_in_range(spec.vocabulary_size, low=0, high=2**32 - 1, field="vocabulary_size")
    if spec.lease_ms is not None:
        count_in_range(
            spec.lease_ms, low=limits.LEASE_MS_MIN, high=limits.LEASE_MS_MAX, field="lease"
        )
    model_version(spec.model_version)
    eviction_policy(spec.eviction_policy)
    for field in ("model_name", "kv_format", "worker_address"):
        length_at_most(getattr(spec, field), length_max=limits.POOL_TEXT_LENGTH_MAX, field=field)
    _groups(spec)


def _groups(spec: PoolSpec) -> None:
    if len(spec.groups) > limits.GROUPS_PER_POOL_MAX:
        raise FieldInvalid(
            f"groups has {len(spec.groups)} entries, more than {limits.GROUPS_PER_POOL_MAX}",
            numbers={
                "group_count": len(spec.groups),
                "groups_per_pool_max": limits.GROUPS_PER_POOL_MAX,
            },
            field="groups",
        )
    kinds = [group.kind for group in spec.groups]
    if kinds[:1] != [GroupKind.FULL_ATTENTION] or GroupKind.STATE_SPACE in kinds:
        raise Unsupported(
            "a full-attention group comes first, and state-space groups are not offered",
            field="groups",
        )
    for index, group in enumerate(spec.groups):
        field = f"groups[{index}]"
        count_in_range(group.layer_count, low=0, high=2**31 - 1, field=f"{field}.layer_count")
        if group.kind is GroupKind.SLIDING_WINDOW:
            count_in_range(
                group.window_token_count,
                low=1,
                high=2**31 - 1,
                field=f"{field}.window_token_count",
            )
        elif group.window_token_count != 0:
            raise FieldInvalid(
                "a full-attention group has no window", field=f"{field}.window_token_count"
            )
