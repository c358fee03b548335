"""`prefixd relay` as consumers see it: a real SUB socket and a real replay client."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import zmq

from prefixd.clients import AsyncControllerClient, Connection
from prefixd.clients.relay.follow import Relay
from prefixd.clients.relay.publisher import END_OF_REPLAY, Publication, Publisher
from prefixd.clients.relay.vllm_events import HashForm
from prefixd.controller.config import Config
from prefixd.v1 import admin_pb2, inspect_pb2, types_pb2
from tests.support.controller import ANY_PORT, Stubs, controller_thread, stubs
from tests.support.driver import Driver, close_entry, open_entry

TIMEOUT_S = 30
TIMEOUT_MS = TIMEOUT_S * 1_000
ANY_ENDPOINT = "tcp://127.0.0.1:*"


@dataclass
class Consumer:
    """What a router keeps: the hashes that it believes are cached, each in its KV group."""

    hashes: set[tuple[int, int]] = field(default_factory=set)

    def apply(self, payload: bytes) -> None:
        """Applies a batch."""
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self.hashes.update(_in_group(event))
                case "BlockRemoved":
                    self.hashes.difference_update(_in_group(event))
                case "AllBlocksCleared":
                    self.hashes.clear()


def _in_group(event: dict[str, Any]) -> set[tuple[int, int]]:
    return {(event["group_idx"], block_hash) for block_hash in event["block_hashes"]}


@contextmanager
def relaying(address: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs the command; gives the process and what it announced."""
    command = [sys.executable, "-m", "prefixd.clients.cli.main", "relay", "--json"]
    process = subprocess.Popen(
        [
            *command,
            *("--controller", address, "--publish", ANY_ENDPOINT, "--replay", ANY_ENDPOINT),
            *("--topic", "kv@pod@model", *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()


@contextmanager
def socket(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """Connects a socket for the length of the block."""
    with zmq.Context() as context, context.socket(kind) as connected:
        connected.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        connected.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            connected.setsockopt(zmq.SUBSCRIBE, b"kv@")
        connected.connect(endpoint)
        yield connected


def replayed(endpoint: str, *, start: int) -> list[tuple[int, bytes]]:
    """Asks for past batches."""
    with socket(zmq.DEALER, endpoint) as dealer:
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        batches = []
        while True:
            empty, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number, "big"), payload))


def live(calls: Stubs) -> set[tuple[int, int]]:
    """The published blocks now: the KV group and the last 8 bytes of the digest."""
    page = calls.inspect.ListBlocks(
        inspect_pb2.ListBlocksRequest(pool_name="pool", page_size=1_000)
    )
    return {
        (block.group_index, int(block.hash_hex[-16:], 16))
        for block in page.blocks
        if block.hash_hex
    }


def caught_up(endpoint: str, calls: Stubs) -> Consumer:
    """Replays everything until it is what the pool holds."""
    while True:
        consumer = Consumer()
        for _, payload in replayed(endpoint, start=0):
            consumer.apply(payload)
        if consumer.hashes == live(calls):
            return consumer


def store(driver: Driver, handle: int) -> None:
    """Publishes two blocks that nobody published before."""
    driver.step(open_entry(handle, [handle] * 9))
    driver.step(close_entry(handle))


def test_subscriber_and_replay_lead_to_the_live_set() -> None:
    """A late subscriber fetches what it missed by number, and follows from there."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        driver = Driver(calls)
        store(driver, 1)
        with (
            relaying(controller.address) as (_, announced),
            socket(zmq.SUB, announced["endpoint"]) as subscriber,
        ):
            handle = 2
            while not subscriber.poll(50):
                store(driver, handle)
                handle += 1
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv@pod@model"
            first = int.from_bytes(number, "big")
            missed = replayed(announced["replay_endpoint"], start=0)[: first + 1]
            assert [at for at, _ in missed] == list(range(first + 1))
            assert missed[first][1] == payload
            consumer = Consumer()
            for _, old in missed:
                consumer.apply(old)
            calls.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(pool_name="pool", block_ids=[1]))
            while consumer.hashes != live(calls):
                _, number, payload = subscriber.recv_multipart()
                first += 1
                assert int.from_bytes(number, "big") == first
                consumer.apply(payload)


def test_new_epoch_clears_first() -> None:
    """Consumers never believe in blocks of an epoch that has ended."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        store(Driver(calls), 1)
        with relaying(controller.address) as (_, announced):
            before = caught_up(announced["replay_endpoint"], calls)
            assert len(before.hashes) == 2
            store(Driver(calls), 2)
            after = caught_up(announced["replay_endpoint"], calls)
            assert len(after.hashes) == 2
            assert after.hashes.isdisjoint(before.hashes)


def test_s25_blocks_of_a_window_group_are_relayed_with_their_group() -> None:
    """One content is stored in each group, and an evicted window block goes in its own alone."""
    kinds = types_pb2.KvGroupKind
    groups = [
        types_pb2.KvGroup(kind=kinds.KV_GROUP_KIND_FULL_ATTENTION),
        types_pb2.KvGroup(kind=kinds.KV_GROUP_KIND_SLIDING_WINDOW, window_token_count=6),
    ]
    with controller_thread() as controller, stubs(controller.address) as calls:
        driver = Driver(calls, groups=groups)
        store(driver, 1)
        driver.step()
        with relaying(controller.address) as (_, announced):
            before = caught_up(announced["replay_endpoint"], calls)
            assert [group_index for group_index, _ in sorted(before.hashes)] == [0, 0, 1, 1]
            assert len({block_hash for _, block_hash in before.hashes}) == 2
            calls.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(pool_name="pool", block_ids=[4]))
            after = caught_up(announced["replay_endpoint"], calls)
            assert [group_index for group_index, _ in before.hashes - after.hashes] == [1]


def test_relay_that_starts_late_begins_with_what_is_kept() -> None:
    """Events that are gone cost hits, but nothing false is published."""
    config = Config(listen=ANY_PORT, event_bytes_kept_max=1_500)
    with controller_thread(config) as controller, stubs(controller.address) as calls:
        driver = Driver(calls, block_count=100)
        for handle in range(1, 21):
            store(driver, handle)
        with relaying(controller.address) as (_, announced):
            consumer = Consumer()
            while not consumer.hashes:
                for _, payload in replayed(announced["replay_endpoint"], start=0):
                    consumer.apply(payload)
            assert consumer.hashes < live(calls)


def test_replay_ignores_other_requests_and_answers_the_next() -> None:
    """A malformed request is not worth an answer, and no reason to stop."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        Driver(calls)
        with (
            relaying(controller.address) as (_, announced),
            socket(zmq.DEALER, announced["replay_endpoint"]) as dealer,
        ):
            dealer.send_multipart((b"", b"short"))
            dealer.send_multipart((b"x",))
            dealer.send_multipart((b"", (2**63).to_bytes(8, "big")))
            assert dealer.recv_multipart() == [b"", END_OF_REPLAY, b""]


class BrokenReplay(Publisher):
    """A publisher whose replay fails."""

    async def serve_replay(self) -> None:
        """Fails as a socket does."""
        raise zmq.ZMQError(zmq.ENOTSOCK)


def test_relay_ends_where_its_replay_has_failed() -> None:
    """Consumers that wait for an answer to a replay would wait for ever."""

    async def relay(address: str) -> None:
        publisher = BrokenReplay(
            Publication(ANY_ENDPOINT, ANY_ENDPOINT, "", 0, batches_kept_max=1), clock=time.time
        )
        try:
            async with AsyncControllerClient(Connection(address)) as client:
                running = Relay(client, publisher, pool_name="pool", form=HashForm.INT).run()
                await asyncio.wait_for(running, TIMEOUT_S)
        finally:
            publisher.close()

    with controller_thread() as controller, stubs(controller.address) as calls:
        Driver(calls)
        with pytest.raises(zmq.ZMQError):
            asyncio.run(relay(controller.address))


def test_relay_keeps_no_more_batches_than_told() -> None:
    """The oldest ones go."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        driver = Driver(calls)
        with relaying(controller.address, "--keep", "2") as (_, announced):
            numbers = [0]
            for handle in range(1, 6):
                store(driver, handle)
                while numbers[-1] < handle:
                    batches = replayed(announced["replay_endpoint"], start=0)
                    numbers = [number for number, _ in batches] or [0]
            assert numbers == [4, 5]


def test_relay_ends_on_sigterm() -> None:
    """With exit status 0."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        Driver(calls)
        with relaying(controller.address) as (process, _):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--publish", "nonsense"), "cannot publish on nonsense"),
        (("--pool", "nowhere"), "POOL_NOT_FOUND"),
    ],
)
def test_relay_that_cannot_start_says_so_in_one_line(options: tuple[str, ...], said: str) -> None:
    """No traceback, exit status 1."""
    with controller_thread() as controller, stubs(controller.address) as calls:
        Driver(calls)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "prefixd.clients.cli.main", "relay"),
                *("--controller", controller.address, *options),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
