"""What vLLM's consumers read, compared with what vLLM itself published."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from prefixd.clients import Cleared, Connection, ControllerClient, Removed, Stored, Watched
from prefixd.clients.relay.vllm_events import HashForm, vllm_events
from prefixd.clients.results import KvGroup, KvGroupKind
from prefixd.controller.config import Config
from tests.golden.grpc_subject import GrpcSubject
from tests.golden.player import Player
from tests.golden.subjects import spec_of
from tests.golden.traces import load_traces
from tests.support.controller import ANY_PORT, controller_thread, stubs

DATA = Path(__file__).parents[2] / "golden" / "data" / "apc_traces.json"
FULL = KvGroup(KvGroupKind.FULL_ATTENTION, 0, 2)


def per_block(kind: str, fields: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Splits one event into what it says of each block."""
    if kind != "BlockStored":
        return [(kind, digest) for digest in fields.get("block_hashes", [None])]
    parent = fields["parent_block_hash"]
    size = len(fields["token_ids"]) // len(fields["block_hashes"])
    keys = fields.get("extra_keys") or [None] * len(fields["block_hashes"])
    said = []
    for index, digest in enumerate(fields["block_hashes"]):
        token_ids = fields["token_ids"][index * size : (index + 1) * size]
        said.append((kind, digest, parent, token_ids, fields["lora_name"], keys[index]))
        parent = digest
    return said


def recorded(row: list[Any]) -> list[tuple[Any, ...]]:
    """Reads one recorded event."""
    match row:
        case ["BlockStored", digests, parent, token_ids, _, lora_name, extra_keys, _]:
            return per_block(
                "BlockStored",
                {
                    "block_hashes": digests,
                    "parent_block_hash": parent,
                    "token_ids": token_ids,
                    "lora_name": lora_name,
                    "extra_keys": extra_keys,
                },
            )
        case ["BlockRemoved", digest, _]:
            return per_block("BlockRemoved", {"block_hashes": [digest]})
        case _:
            return per_block(row[0], {})


def test_converted_events_equal_what_vllm_published() -> None:
    """Hashes, parents, tokens, LoRA names and extra keys of every block of the recorded traces."""
    rows = json.loads(DATA.read_text())
    traces = load_traces(DATA)
    for index, (row, trace) in enumerate(zip(rows, traces, strict=True)):
        config = Config(
            listen=ANY_PORT, hash_algorithm=trace.hash_algorithm, hash_seed=trace.hash_seed
        )
        with controller_thread(config) as controller, stubs(controller.address) as connected:
            spec = spec_of(trace, pool_name=f"trace-{index}")
            with closing(GrpcSubject(connected, spec)) as subject:
                Player(subject).play(trace)
                converted = published(controller.address, spec.pool_name)
        expected = [
            said for op in row["ops"] for event in op.get("events", ()) for said in recorded(event)
        ]
        assert [said for event in converted for said in per_block(event["type"], event)] == expected


def published(address: str, pool_name: str) -> list[dict[str, Any]]:
    """Reads all events of a pool and converts them."""
    with ControllerClient(Connection(address)) as client:
        revision = client.pool(pool_name).revision
        watched = Watched(pool_name, after_revision=0, with_token_ids=True)
        converted: list[dict[str, Any]] = []
        with client.watch_events(watched) as batches:
            for batch in batches:
                converted += vllm_events(batch.events, form=HashForm.INT, groups=[FULL])
                if batch.through_revision == revision:
                    return converted
    raise AssertionError("the watch ended early")


STORED = Stored(
    revision=1,
    hashes_hex=("ff" * 32,),
    parent_hash_hex="",
    token_ids=(1, 2),
    block_size=2,
    group_index=0,
    lora=None,
    cache_salt="",
    model_version="",
    block_keys=(),
)


def test_every_field_that_a_consumer_needs_is_there() -> None:
    """Fields without a default are always sent, the others where they say something."""
    (event,) = vllm_events([STORED], form=HashForm.INT, groups=[FULL])
    assert event == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_window_groups_tell_their_window() -> None:
    """A consumer counts such blocks otherwise."""
    window = KvGroup(KvGroupKind.SLIDING_WINDOW, 128, 1)
    (event,) = vllm_events([STORED], form=HashForm.INT, groups=[window])
    assert event["kv_cache_spec_kind"] == "sliding_window"
    assert event["kv_cache_spec_sliding_window"] == 128


def test_hashes_may_be_whole_digests() -> None:
    """As bytes, also in removed events, which have one hash each."""
    removed = Removed(2, ("01" * 32, "02" * 32), 0)
    events = vllm_events([STORED, removed, Cleared(3)], form=HashForm.BYTES, groups=[FULL])
    assert events[0]["block_hashes"] == [b"\xff" * 32]
    assert [event["block_hashes"] for event in events[1:3]] == [[b"\x01" * 32], [b"\x02" * 32]]
    assert events[3] == {"type": "AllBlocksCleared"}
