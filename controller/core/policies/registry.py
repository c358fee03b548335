"""All eviction policies by the names that pools choose them by."""

from prefixd.controller.core.policies.lru import LeastRecentlyUsed
from prefixd.controller.core.policies.policy import EvictionPolicy
from prefixd.controller.core.policies.retention import Retention

EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "retention": Retention,
}
"""A policy is added by its file and its line here."""
