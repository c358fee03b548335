"""The controller's typed clients against a real controller."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from prefixd.clients import (
    AddressInvalid,
    AsyncControllerClient,
    BlockContent,
    BlockState,
    CallRefused,
    Connection,
    ControllerClient,
    DeadlinePassed,
    Identity,
    LoraAdapter,
    MultimodalItem,
    PrefixdError,
    ServerUnreachable,
    WorkerClient,
)
from tests.clients.conftest import BLOCK_COUNT, BLOCK_SIZE, POOL_NAME, SHARED_PREFIX, Scene
from tests.support.controller import controller_thread, stubs
from tests.support.driver import Driver, close_entry, open_entry

SALTED_IDENTITY = Identity(
    lora=LoraAdapter(name="poet", path="/poet", version="2"),
    multimodal_items=(MultimodalItem(identifier="image", offset=0, token_count=2),),
    cache_salt="salt",
    prompt_embeds_digests=(bytes(range(32)).hex(),),
)


@pytest.fixture
def client(scene: Scene) -> Iterator[ControllerClient]:
    """A client of the scene's controller."""
    with ControllerClient(Connection(scene.address)) as opened:
        yield opened


def test_server_info_describes_the_controller(client: ControllerClient) -> None:
    """GetServerInfo comes as a frozen value with a time that knows its zone."""
    info = client.server_info()
    assert info.hash_algorithm == "sha256_cbor"
    assert info.pool_count == 1
    assert info.start_time.tzinfo is not None
    assert info.limits


def test_pool_shows_its_accounts(client: ControllerClient) -> None:
    """GetPool's accounts add up to the pool."""
    pool = client.pool(POOL_NAME)
    assert (pool.block_count, pool.block_size) == (BLOCK_COUNT, BLOCK_SIZE)
    assert pool.held_block_count == 5
    held_and_others = pool.held_block_count + pool.evictable_block_count + pool.free_block_count
    assert held_and_others == BLOCK_COUNT - 1
    assert pool.statistics.hit_token_count == len(SHARED_PREFIX)
    assert pool.lease_left_ms is not None


def test_pools_yields_every_pool(client: ControllerClient) -> None:
    """ListPools comes as an iterator of values."""
    assert [client.pool(POOL_NAME)] == list(client.pools())


def test_listings_page_through_all_rows(client: ControllerClient) -> None:
    """A page size smaller than the listing changes how often the server is asked, not the rows."""
    all_blocks = list(client.blocks(POOL_NAME))
    assert list(range(1, BLOCK_COUNT)) == [block.block_id for block in all_blocks]
    assert all_blocks == list(client.blocks(POOL_NAME, page_size=2))
    sequences = [sequence.sequence_id for sequence in client.sequences(POOL_NAME, page_size=1)]
    assert ["first", "salted", "second"] == sequences


def test_sequence_shows_its_block_table(client: ControllerClient) -> None:
    """GetSequence shows positions and the table with the shared blocks."""
    found = client.sequence(pool_name=POOL_NAME, sequence_id="second")
    assert [(1, 2, 4)] == [table.block_ids for table in found.tables]
    assert (found.sequence.known_count, found.sequence.cached_count) == (9, 8)


def test_identity_comes_back_as_it_was_stated(client: ControllerClient) -> None:
    """Every part of a sequence's identity is shown."""
    found = client.sequence(pool_name=POOL_NAME, sequence_id="salted")
    assert found.sequence.identity == SALTED_IDENTITY


def test_block_shows_state_content_and_holders(client: ControllerClient) -> None:
    """GetBlock names the sequences that share a block."""
    found = client.block(pool_name=POOL_NAME, block_id=2)
    assert ("first", "second") == found.sequence_ids
    assert (BlockState.HELD, BlockContent.PUBLISHED) == (found.block.state, found.block.content)
    first = client.block(pool_name=POOL_NAME, block_id=1).block
    assert found.block.parent_hash_hex == first.hash_hex


def test_blocks_can_be_narrowed_to_a_state(client: ControllerClient) -> None:
    """The filter reaches the server."""
    held = client.blocks(POOL_NAME, state=BlockState.HELD)
    assert [1, 2, 3, 4, 5] == [block.block_id for block in held]


def test_free_blocks_are_the_rest_in_order(client: ControllerClient) -> None:
    """ListFreeBlocks keeps the order in which blocks would be handed out."""
    assert (6, 7, 8, 9, 10, 11) == client.free_blocks(POOL_NAME).block_ids


def test_match_prefix_counts_cached_tokens(client: ControllerClient) -> None:
    """MatchPrefix sends tokens and identity."""
    token_ids = [*SHARED_PREFIX, 99]
    match = client.match_prefix(pool_name=POOL_NAME, token_ids=token_ids)
    assert (match.published_token_count, match.pending_token_count) == (8, 0)
    salted = client.match_prefix(
        pool_name=POOL_NAME, token_ids=token_ids, identity=Identity(cache_salt="other")
    )
    assert salted.published_token_count == 0


def test_flush_is_refused_while_blocks_are_held(client: ControllerClient) -> None:
    """A refused call carries reason, code and numbers; the pool's accounts stay as they were."""
    before = client.pool(POOL_NAME)
    with pytest.raises(CallRefused) as raised:
        client.flush_pool(POOL_NAME)
    assert ("BLOCKS_IN_USE", "FAILED_PRECONDITION") == (raised.value.reason, raised.value.code)
    assert "5" in raised.value.metadata.values()
    after = client.pool(POOL_NAME)
    assert before.held_block_count == after.held_block_count
    assert before.revision == after.revision


def test_flush_tells_how_much_it_dropped() -> None:
    """FlushPool empties an idle pool, and finds nothing the second time."""
    with controller_thread() as controller, stubs(controller.address) as raw:
        driver = Driver(raw, POOL_NAME, block_size=BLOCK_SIZE)
        driver.step(open_entry(1, SHARED_PREFIX))
        driver.step(close_entry(1))
        driver.step()
        with ControllerClient(Connection(controller.address)) as client:
            assert client.flush_pool(POOL_NAME).dropped_block_count == 2
            assert client.flush_pool(POOL_NAME).dropped_block_count == 0


def test_a_field_error_names_its_field(client: ControllerClient) -> None:
    """BadRequest's field comes through."""
    with pytest.raises(CallRefused) as raised:
        list(client.blocks(POOL_NAME, page_size=-1))
    assert ("FIELD_INVALID", "page_size") == (raised.value.reason, raised.value.field)


def test_a_dead_server_is_unreachable(unused_port: int) -> None:
    """Nobody at the address: ServerUnreachable at once, with the address in it."""
    address = f"127.0.0.1:{unused_port}"
    with (
        ControllerClient(Connection(address)) as client,
        pytest.raises(ServerUnreachable, match=address),
    ):
        client.server_info()


def test_a_silent_server_runs_into_the_deadline() -> None:
    """Somebody listens but never answers: DeadlinePassed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            ControllerClient(Connection(address, timeout_s=0.3)) as client,
            pytest.raises(DeadlinePassed, match=address),
        ):
            client.server_info()


def test_a_server_without_the_call_says_so(scene: Scene) -> None:
    """A controller asked for what a worker offers: no traceback of gRPC, one clear sentence."""
    with (
        WorkerClient(Connection(scene.address)) as client,
        pytest.raises(PrefixdError, match="does not offer this call"),
    ):
        client.worker_info()


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "host:",
        ":7600",
        "host:0",
        "host:65536",
        "host:-1",
        "host:٣",
        "unix:",
        "::1:7600",
    ],
)
def test_a_malformed_address_is_refused_before_any_call(address: str) -> None:
    """The address is checked when the connection is described."""
    with pytest.raises(AddressInvalid, match="address"):
        Connection(address)


@pytest.mark.parametrize("address", ["localhost:7600", "[::1]:7600", "unix:/run/prefixd.sock"])
def test_a_good_address_is_accepted(address: str) -> None:
    """TCP by name, IPv6 and unix sockets."""
    assert Connection(address).address == address


def test_wait_until_serving_follows_health(scene: Scene, unused_port: int) -> None:
    """A serving controller is ready at once; an absent one runs into the time given."""
    with ControllerClient(Connection(scene.address)) as client:
        client.wait_until_serving(timeout_s=10)
    with (
        ControllerClient(Connection(f"127.0.0.1:{unused_port}")) as absent,
        pytest.raises(ServerUnreachable, match="was not ready"),
    ):
        absent.wait_until_serving(timeout_s=0.3)


def test_the_asyncio_client_returns_the_same(scene: Scene, client: ControllerClient) -> None:
    """Every call of the asyncio client agrees with its synchronous twin."""

    async def everything() -> list[Any]:
        async with AsyncControllerClient(Connection(scene.address)) as twin:
            await twin.wait_until_serving(timeout_s=10)
            return [
                await twin.server_info(),
                [pool.pool_name async for pool in twin.pools()],
                (await twin.pool(POOL_NAME)).revision,
                [row async for row in twin.sequences(POOL_NAME, page_size=2)],
                await twin.sequence(pool_name=POOL_NAME, sequence_id="first"),
                [row async for row in twin.blocks(POOL_NAME, page_size=3)],
                await twin.block(pool_name=POOL_NAME, block_id=3),
                await twin.free_blocks(POOL_NAME),
                await twin.match_prefix(pool_name=POOL_NAME, token_ids=SHARED_PREFIX),
            ]

    assert asyncio.run(everything()) == [
        client.server_info(),
        [pool.pool_name for pool in client.pools()],
        client.pool(POOL_NAME).revision,
        list(client.sequences(POOL_NAME)),
        client.sequence(pool_name=POOL_NAME, sequence_id="first"),
        list(client.blocks(POOL_NAME)),
        client.block(pool_name=POOL_NAME, block_id=3),
        client.free_blocks(POOL_NAME),
        client.match_prefix(pool_name=POOL_NAME, token_ids=SHARED_PREFIX),
    ]


def test_the_asyncio_client_waits_no_longer_than_told(unused_port: int) -> None:
    """An absent server ends the wait with the same error."""

    async def wait() -> None:
        async with AsyncControllerClient(Connection(f"127.0.0.1:{unused_port}")) as absent:
            await absent.wait_until_serving(timeout_s=0.3)

    with pytest.raises(ServerUnreachable, match="was not ready"):
        asyncio.run(wait())


def test_the_asyncio_client_raises_the_same_errors(scene: Scene) -> None:
    """A refusal carries its reason in asyncio too."""

    async def flush() -> None:
        async with AsyncControllerClient(Connection(scene.address)) as twin:
            await twin.flush_pool(POOL_NAME)

    with pytest.raises(CallRefused) as raised:
        asyncio.run(flush())
    assert raised.value.reason == "BLOCKS_IN_USE"
