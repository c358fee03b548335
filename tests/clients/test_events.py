"""Following, evicting and verifying a pool through the typed clients and the command line."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from prefixd.clients import (
    AsyncControllerClient,
    CallRefused,
    Cleared,
    Connection,
    ControllerClient,
    Removed,
    Stored,
    Watched,
)
from prefixd.clients.cli.main import EXIT_USAGE, run
from prefixd.v1 import types_pb2
from tests.support.controller import controller_thread, stubs
from tests.support.driver import Driver, close_entry, open_entry

PROMPT = list(range(100, 113))


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A pool whose first sequence was published and is closed: blocks 1, 2 and 3 are cached."""
    with controller_thread() as controller, stubs(controller.address) as raw:
        driver = Driver(raw, block_count=20, block_size=4)
        driver.address = controller.address
        identity = types_pb2.Identity(
            lora=types_pb2.LoraAdapter(name="poet"),
            cache_salt="salt",
            multimodal_items=[types_pb2.MultimodalItem(identifier="cat", offset=5, token_count=1)],
        )
        driver.step(open_entry(1, PROMPT, identity=identity))
        driver.step(close_entry(1))
        yield driver


@pytest.fixture
def client(driver: Driver) -> Iterator[ControllerClient]:
    """A client of its controller."""
    with ControllerClient(Connection(driver.address)) as opened:
        yield opened


def test_events_are_typed_and_resumable(driver: Driver, client: ControllerClient) -> None:
    """Stored, removed and cleared, with what each tells."""
    client.evict_blocks("pool", block_ids=[3])
    client.flush_pool("pool")
    with client.watch_events(Watched("pool", after_revision=0, with_token_ids=True)) as batches:
        batch = next(batches)
    stored, removed, cleared = batch.events
    assert isinstance(stored, Stored)
    assert stored.token_ids == tuple(PROMPT[:12])
    assert stored.lora is not None
    assert (stored.lora.name, stored.cache_salt) == ("poet", "salt")
    assert [(key.index, key.identifier, key.offset) for key in stored.block_keys] == [(1, "cat", 1)]
    assert isinstance(removed, Removed)
    assert removed.hashes_hex == stored.hashes_hex[2:]
    assert isinstance(cleared, Cleared)
    assert batch.through_revision == cleared.revision == 3
    with client.watch_events(Watched("pool", epoch=batch.epoch, after_revision=2)) as batches:
        assert next(batches).events == (cleared,)


def test_listing_and_the_events_behind_it_are_the_live_set(
    driver: Driver, client: ControllerClient
) -> None:
    """The listing says where to begin to watch."""
    listed = client.published("pool")
    assert len(listed.hashes_hex) == 3
    driver.step(open_entry(2, [7] * 9))
    driver.step()
    digests = set(listed.hashes_hex)
    watched = Watched("pool", epoch=listed.epoch, after_revision=listed.revision)
    with client.watch_events(watched) as batches:
        for event in next(batches).events:
            assert isinstance(event, Stored)
            digests.update(event.hashes_hex)
    assert digests == client.published("pool").hashes_hex


def test_asyncio_twin_does_the_same(driver: Driver, client: ControllerClient) -> None:
    """Every new method of the synchronous client has its twin."""

    async def seen() -> tuple[object, ...]:
        async with AsyncControllerClient(Connection(driver.address)) as twin:
            async with twin.watch_events(Watched("pool", after_revision=0)) as batches:
                batch = await anext(batches)
            listed = await twin.published("pool")
            verified = await twin.verify_pool("pool")
            return batch, listed, verified, await twin.evict_blocks("pool", block_ids=[1])

    batch, listed, verified, evicted = asyncio.run(seen())
    assert listed.hashes_hex == set(batch.events[0].hashes_hex)
    assert verified.cached_block_count == 3
    assert evicted.dropped_block_count == 3


def test_watch_of_an_ended_epoch_is_refused(driver: Driver, client: ControllerClient) -> None:
    """The reason is the contract."""
    with (
        client.watch_events(Watched("pool", epoch=1)) as batches,
        pytest.raises(CallRefused) as refused,
    ):
        next(batches)
    assert refused.value.reason == "EPOCH_STALE"


def ran(driver: Driver, *arguments: str) -> int:
    """Runs a command against the controller."""
    return run([arguments[0], "--controller", driver.address, *arguments[1:]])


def test_watch_prints_a_line_per_event(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    """For people, and for programs with --json."""
    assert ran(driver, "evict", "3") == 0
    assert capsys.readouterr().out == "dropped 1 cached block, 0 of them still held\n"
    assert ran(driver, "watch", "--after-revision", "0", "--count", "2") == 0
    stored, removed = capsys.readouterr().out.splitlines()
    assert stored.split()[:2] == ["1", "stored"]
    assert "and 2 more behind the root" in stored
    assert removed.split()[:2] == ["2", "removed"]
    command = ("watch", "--after-revision", "0", "--count", "1", "--token-ids", "--json")
    assert ran(driver, *command) == 0
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["revision"], event["lora"]["name"]) == ("stored", 1, "poet")
    assert event["token_ids"] == PROMPT[:12]


def test_evict_takes_digests(
    driver: Driver, client: ControllerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `prefixd block --json` shows can be given back."""
    digest = client.block(pool_name="pool", block_id=2).block.hash_hex
    assert ran(driver, "evict", "--hash", digest, "--json") == 0
    assert json.loads(capsys.readouterr().out)["dropped_block_count"] == 2


def test_evict_without_a_block_is_refused(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says so."""
    assert ran(driver, "evict") == EXIT_USAGE
    assert capsys.readouterr().err.startswith("prefixd: name blocks by id")


def test_verify_prints_what_was_checked(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each invariant, and the counts."""
    assert ran(driver, "verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: ")
    assert lines[-1] == "checked 19 blocks, 3 of them cached, 3 digests, 0 sequences"
    assert ran(driver, "verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["digest_count"] == 3
