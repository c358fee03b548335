"""A controller with a driven pool, for the clients that look at it."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prefixd.v1 import types_pb2
from tests.support.controller import controller_thread, stubs
from tests.support.driver import Driver, open_entry

POOL_NAME = "pool"
SHARED_PREFIX = (11, 12, 13, 14, 15, 16, 17, 18)
BLOCK_SIZE = 4
BLOCK_COUNT = 12


@dataclass(frozen=True)
class Scene:
    """Where the controller listens and who drives its pool.

    Two open sequences share a prefix of two blocks: "first" holds blocks 1, 2, 3 and "second"
    1, 2, 4. A third, "salted", holds block 5 under an identity of its own.
    """

    address: str
    driver: Driver


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """A controller with one pool and three open sequences, all of their tokens written."""
    with controller_thread() as controller, stubs(controller.address) as raw:
        driver = Driver(raw, POOL_NAME, block_count=BLOCK_COUNT, block_size=BLOCK_SIZE)
        identity = types_pb2.Identity(
            lora=types_pb2.LoraAdapter(name="poet", path="/poet", version="2"),
            multimodal_items=[
                types_pb2.MultimodalItem(identifier="image", offset=0, token_count=2)
            ],
            cache_salt="salt",
            prompt_embeds_digests=[bytes(range(32))],
        )
        driver.step(open_entry(1, [*SHARED_PREFIX, 21, 22], sequence_id="first"))
        driver.step(open_entry(2, [*SHARED_PREFIX, 31], sequence_id="second"))
        driver.step(open_entry(3, SHARED_PREFIX[:4], sequence_id="salted", identity=identity))
        driver.step()
        yield Scene(controller.address, driver)


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
