"""The controller's clients: inspection, matching and administration."""

from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial

from prefixd.clients import calls, results
from prefixd.clients.connection import CONTROLLER_ADDRESS_DEFAULT, Connection
from prefixd.clients.event_stream import AsyncEventStream, EventStream
from prefixd.clients.events import Watched, watch_message
from prefixd.clients.transport import AsyncClient, AsyncTransport, SyncClient, Transport

PAGE_SIZE_DEFAULT = 1_000
"""Rows that a listing fetches at a time: the server's largest page."""


class ControllerClient(SyncClient):
    """A synchronous client of a controller; safe to share between threads.

    Every method raises PrefixdError. `timeout_s` is the deadline of one call (of each page of a
    listing); None is the connection's own.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        super().__init__(Transport(connection or Connection(CONTROLLER_ADDRESS_DEFAULT)))

    def server_info(self, *, timeout_s: float | None = None) -> results.ServerInfo:
        """Describes the controller."""
        return self._transport.call(calls.server_info(), timeout_s=timeout_s)

    def pools(
        self, *, page_size: int = PAGE_SIZE_DEFAULT, timeout_s: float | None = None
    ) -> Iterator[results.Pool]:
        """Yields all pools by name."""
        listing = partial(calls.pools, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    def pool(self, pool_name: str, *, timeout_s: float | None = None) -> results.Pool:
        """Shows one pool and its accounts."""
        return self._transport.call(calls.pool(pool_name), timeout_s=timeout_s)

    def sequences(
        self,
        pool_name: str,
        *,
        page_size: int = PAGE_SIZE_DEFAULT,
        timeout_s: float | None = None,
    ) -> Iterator[results.Sequence]:
        """Yields a pool's open sequences by id."""
        listing = partial(calls.sequences, pool_name=pool_name, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    def sequence(
        self, *, pool_name: str, sequence_id: str, timeout_s: float | None = None
    ) -> results.SequenceTables:
        """Shows one sequence with its block tables."""
        call = calls.sequence(pool_name=pool_name, sequence_id=sequence_id)
        return self._transport.call(call, timeout_s=timeout_s)

    def blocks(
        self,
        pool_name: str,
        *,
        state: results.BlockState | None = None,
        page_size: int = PAGE_SIZE_DEFAULT,
        timeout_s: float | None = None,
    ) -> Iterator[results.Block]:
        """Yields a pool's blocks by id; `state` None is all of them."""
        listing = partial(calls.blocks, pool_name=pool_name, state=state, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    def block(
        self, *, pool_name: str, block_id: int, timeout_s: float | None = None
    ) -> results.BlockHolders:
        """Shows one block and the sequences that hold it."""
        call = calls.block(pool_name=pool_name, block_id=block_id)
        return self._transport.call(call, timeout_s=timeout_s)

    def free_blocks(self, pool_name: str, *, timeout_s: float | None = None) -> results.FreeOrder:
        """Shows the whole free order of a pool at one revision."""
        return self._transport.call(calls.free_blocks(pool_name), timeout_s=timeout_s)

    def match_prefix(
        self,
        *,
        pool_name: str,
        token_ids: SequenceOf[int],
        identity: results.Identity | None = None,
        timeout_s: float | None = None,
    ) -> results.PrefixMatch:
        """Tells how many leading tokens of a prompt are cached now; changes nothing."""
        call = calls.match_prefix(pool_name=pool_name, token_ids=token_ids, identity=identity)
        return self._transport.call(call, timeout_s=timeout_s)

    def flush_pool(self, pool_name: str, *, timeout_s: float | None = None) -> results.Flushed:
        """Drops all cached content of a pool; BLOCKS_IN_USE while any block is held."""
        return self._transport.call(calls.flush_pool(pool_name), timeout_s=timeout_s)

    def evict_blocks(
        self,
        pool_name: str,
        *,
        block_ids: SequenceOf[int] = (),
        hashes_hex: SequenceOf[str] = (),
        timeout_s: float | None = None,
    ) -> results.Evicted:
        """Takes blocks out of the cache, by id or digest, with everything behind them."""
        call = calls.evict_blocks(pool_name, block_ids=block_ids, hashes_hex=hashes_hex)
        return self._transport.call(call, timeout_s=timeout_s)

    def verify_pool(self, pool_name: str, *, timeout_s: float | None = None) -> results.Verified:
        """Checks every invariant of a pool; INVARIANT_BROKEN where one does not hold."""
        return self._transport.call(calls.verify_pool(pool_name), timeout_s=timeout_s)

    def published(self, pool_name: str, *, timeout_s: float | None = None) -> results.Published:
        """Lists the published digests, which events behind the result's revision complete."""
        page_token, first, hashes_hex = "", None, set[str]()
        while first is None or page_token:
            page = self._transport.call(
                calls.published(page_token, pool_name=pool_name), timeout_s=timeout_s
            )
            first = first or page
            hashes_hex.update(page.rows)
            page_token = page.next_page_token
        return _published(first, hashes_hex)

    def watch_events(self, watched: Watched) -> EventStream:
        """Starts to follow a pool's events; nothing is sent before the stream is read."""
        call = self._transport.watch_events(watch_message(watched))
        return EventStream(call, with_token_ids=watched.with_token_ids)


class AsyncControllerClient(AsyncClient):
    """ControllerClient's twin for asyncio; made inside the running loop."""

    def __init__(self, connection: Connection | None = None) -> None:
        super().__init__(AsyncTransport(connection or Connection(CONTROLLER_ADDRESS_DEFAULT)))

    async def server_info(self, *, timeout_s: float | None = None) -> results.ServerInfo:
        """Describes the controller."""
        return await self._transport.call(calls.server_info(), timeout_s=timeout_s)

    def pools(
        self, *, page_size: int = PAGE_SIZE_DEFAULT, timeout_s: float | None = None
    ) -> AsyncIterator[results.Pool]:
        """Yields all pools by name."""
        listing = partial(calls.pools, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    async def pool(self, pool_name: str, *, timeout_s: float | None = None) -> results.Pool:
        """Shows one pool and its accounts."""
        return await self._transport.call(calls.pool(pool_name), timeout_s=timeout_s)

    def sequences(
        self,
        pool_name: str,
        *,
        page_size: int = PAGE_SIZE_DEFAULT,
        timeout_s: float | None = None,
    ) -> AsyncIterator[results.Sequence]:
        """Yields a pool's open sequences by id."""
        listing = partial(calls.sequences, pool_name=pool_name, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    async def sequence(
        self, *, pool_name: str, sequence_id: str, timeout_s: float | None = None
    ) -> results.SequenceTables:
        """Shows one sequence with its block tables."""
        call = calls.sequence(pool_name=pool_name, sequence_id=sequence_id)
        return await self._transport.call(call, timeout_s=timeout_s)

    def blocks(
        self,
        pool_name: str,
        *,
        state: results.BlockState | None = None,
        page_size: int = PAGE_SIZE_DEFAULT,
        timeout_s: float | None = None,
    ) -> AsyncIterator[results.Block]:
        """Yields a pool's blocks by id; `state` None is all of them."""
        listing = partial(calls.blocks, pool_name=pool_name, state=state, page_size=page_size)
        return self._transport.rows(listing, timeout_s=timeout_s)

    async def block(
        self, *, pool_name: str, block_id: int, timeout_s: float | None = None
    ) -> results.BlockHolders:
        """Shows one block and the sequences that hold it."""
        call = calls.block(pool_name=pool_name, block_id=block_id)
        return await self._transport.call(call, timeout_s=timeout_s)

    async def free_blocks(
        self, pool_name: str, *, timeout_s: float | None = None
    ) -> results.FreeOrder:
        """Shows the whole free order of a pool at one revision."""
        return await self._transport.call(calls.free_blocks(pool_name), timeout_s=timeout_s)

    async def match_prefix(
        self,
        *,
        pool_name: str,
        token_ids: SequenceOf[int],
        identity: results.Identity | None = None,
        timeout_s: float | None = None,
    ) -> results.PrefixMatch:
        """Tells how many leading tokens of a prompt are cached now; changes nothing."""
        call = calls.match_prefix(pool_name=pool_name, token_ids=token_ids, identity=identity)
        return await self._transport.call(call, timeout_s=timeout_s)

    async def flush_pool(
        self, pool_name: str, *, timeout_s: float | None = None
    ) -> results.Flushed:
        """Drops all cached content of a pool; BLOCKS_IN_USE while any block is held."""
        return await self._transport.call(calls.flush_pool(pool_name), timeout_s=timeout_s)

    async def evict_blocks(
        self,
        pool_name: str,
        *,
        block_ids: SequenceOf[int] = (),
        hashes_hex: SequenceOf[str] = (),
        timeout_s: float | None = None,
    ) -> results.Evicted:
        """Takes blocks out of the cache, by id or digest, with everything behind them."""
        call = calls.evict_blocks(pool_name, block_ids=block_ids, hashes_hex=hashes_hex)
        return await self._transport.call(call, timeout_s=timeout_s)

    async def verify_pool(
        self, pool_name: str, *, timeout_s: float | None = None
    ) -> results.Verified:
        """Checks every invariant of a pool; INVARIANT_BROKEN where one does not hold."""
        return await self._transport.call(calls.verify_pool(pool_name), timeout_s=timeout_s)

    async def published(
        self, pool_name: str, *, timeout_s: float | None = None
    ) -> results.Published:
        """Lists the published digests, which events behind the result's revision complete."""
        page_token, first, hashes_hex = "", None, set[str]()
        while first is None or page_token:
            page = await self._transport.call(
                calls.published(page_token, pool_name=pool_name), timeout_s=timeout_s
            )
            first = first or page
            hashes_hex.update(page.rows)
            page_token = page.next_page_token
        return _published(first, hashes_hex)

    def watch_events(self, watched: Watched) -> AsyncEventStream:
        """Starts to follow a pool's events; nothing is sent before the stream is read."""
        call = self._transport.watch_events(watch_message(watched))
        return AsyncEventStream(call, with_token_ids=watched.with_token_ids)


def _published(first: results.Page[str], hashes_hex: set[str]) -> results.Published:
    assert first.epoch is not None
    assert first.revision is not None
    return results.Published(first.epoch, first.revision, frozenset(hashes_hex))
