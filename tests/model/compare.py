"""Compares a pool of the core with the naive model: replies, and everything that can be seen."""

from dataclasses import fields, is_dataclass

import numpy as np

from prefixd.controller.core import inspect
from prefixd.controller.core.inspect import BlockContent, BlockState
from prefixd.controller.core.messages import DeferredRow, Refusal, SlotRuns
from prefixd.controller.core.pool import Pool
from tests.model.steps import NaiveLog

REASONS_WITH_BLOCK_COUNTS = ("POOL_EXHAUSTED", "SEQUENCE_EXCEEDS_POOL")
"""Refusals whose numbers both sides must agree on."""

COUNTERS = (
    "sequence_count",
    "query_token_count",
    "hit_token_count",
    "preempted_sequence_count",
    "preempted_query_token_count",
    "preempted_hit_token_count",
    "evicted_block_count",
    "recent_hit_rate",
)
"""Statistics that both sides must agree on."""


def plain(value: object) -> object:
    """Returns a reply, or a part of one, as plain values that can be compared and printed."""
    if isinstance(value, SlotRuns):
        return [
            int(first) + offset
            for first, count in zip(value.first_slots, value.slot_counts, strict=True)
            for offset in range(int(count))
        ]
    if isinstance(value, Refusal):
        numbers = value.numbers if value.reason in REASONS_WITH_BLOCK_COUNTS else ()
        return {"refused": value.reason, "numbers": sorted(numbers)}
    if isinstance(value, DeferredRow) and value.reason not in REASONS_WITH_BLOCK_COUNTS:
        return {"row": value.row, "refused": value.reason}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if is_dataclass(value):
        named = {part.name: plain(getattr(value, part.name)) for part in fields(value)}
        return {"is": type(value).__name__} | named
    return value


def seen_of_pool(pool: Pool) -> dict[str, object]:
    """Returns everything that can be seen of the core's pool."""
    view = inspect.pool_view(pool)
    blocks = inspect.blocks(pool, after=0, count=pool.spec.block_count)
    sequences = inspect.sequences(pool, after="", count=len(blocks) * 2 + 1_000)
    return {
        "free order": [int(block) for block in inspect.free_order(pool)],
        "reference counts": {
            int(row.block_id): row.holder_count for row in blocks if row.holder_count
        },
        "published": {
            int(row.block_id): row.block_hash
            for row in blocks
            if row.content is BlockContent.PUBLISHED
        },
        "places": {
            int(row.block_id): (row.group_index, row.block_index)
            for row in blocks
            if row.content is not BlockContent.PRIVATE
        },
        "pending": {
            int(row.block_id): row.block_hash
            for row in blocks
            if row.content is BlockContent.PENDING
        },
        "tables": {
            row.sequence_id: [
                table.tolist() for table in inspect.block_tables(pool, row.sequence_id)
            ]
            for row in sequences
        },
        "sequences": {
            row.sequence_id: {
                "handle": row.handle,
                "known": row.known_count,
                "scheduled": row.scheduled_count,
                "written": row.written_count,
                "cached": row.cached_count,
                "uncacheable": row.uncacheable,
                "version": row.model_version,
                "cut": row.cut,
            }
            for row in sequences
        },
        "states": {state: sum(row.state is state for row in blocks) for state in BlockState},
        "accounts": {
            BlockState.FREE: view.free_block_count,
            BlockState.EVICTABLE: view.evictable_block_count,
            BlockState.HELD: view.held_block_count,
        },
        "index sizes": (view.published_block_count, view.pending_block_count),
        "positions": (view.applied_step_id, view.executed_step_id),
        "statistics": {name: getattr(view.statistics, name) for name in COUNTERS},
    }


def seen_of_model(model: NaiveLog, *, algorithm: str, root: bytes) -> dict[str, object]:
    """Returns the same of the naive model; digests are computed from content."""
    published, pending = model.published(), model.pending()
    indexed = model.indexed()
    held = model.reference_counts()
    evictable = sum(block not in held for block in indexed)
    states = {
        BlockState.FREE: len(model.free) - evictable,
        BlockState.EVICTABLE: evictable,
        BlockState.HELD: len(held),
    }
    return {
        "free order": list(model.free),
        "reference counts": held,
        "published": {
            block: model.digest_of(place, algorithm=algorithm, root=root)
            for block, place in published.items()
        },
        # A pending block stands in no digest answer (S10).
        "pending": dict.fromkeys(pending),
        "places": {block: (group, len(place) - 1) for block, (group, place) in indexed.items()},
        "tables": {
            sequence.sequence_id: sequence.tables() for sequence in model.sequences.values()
        },
        "sequences": {
            sequence.sequence_id: {
                "handle": sequence.handle,
                "known": sequence.known,
                "scheduled": sequence.scheduled,
                "written": model.written_count(sequence),
                "cached": sequence.cached_count,
                "uncacheable": not sequence.cacheable,
                "version": sequence.version,
                "cut": sequence.cut,
            }
            for sequence in model.sequences.values()
        },
        "states": states,
        "accounts": states,
        "index sizes": (len(published), len(pending)),
        "positions": (model.applied_step_id, model.executed_step_id),
        "statistics": {name: getattr(model.statistics, name) for name in COUNTERS},
    }


def assert_equal_replies(*, of_core: object, of_model: object) -> None:
    """Compares two replies."""
    assert plain(of_core) == plain(of_model)


def assert_equal_tables(pool: Pool, model: NaiveLog) -> None:
    """Compares what can be seen without a look at digests: free order, tables and counts."""
    view = inspect.pool_view(pool)
    assert [int(block) for block in inspect.free_order(pool)] == list(model.free)
    for sequence in model.sequences.values():
        tables = inspect.block_tables(pool, sequence.sequence_id)
        assert [table.tolist() for table in tables] == sequence.tables(), sequence.sequence_id
    assert view.sequence_count == len(model.sequences)
    assert view.published_block_count == len(model.published())
    assert view.pending_block_count == len(model.pending())


def assert_equal_pools(pool: Pool, model: NaiveLog, *, algorithm: str, root: bytes) -> None:
    """Compares everything that can be seen, part by part."""
    of_core = seen_of_pool(pool)
    of_model = seen_of_model(model, algorithm=algorithm, root=root)
    for part, expected in of_model.items():
        assert of_core[part] == expected, f"{part} differs: {of_core[part]} against {expected}"
