"""A running watch, once for threads and once for asyncio."""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from prefixd.clients.events import Events, events_of
from prefixd.clients.transport import AsyncStreamCall, StreamCall
from prefixd.v1 import events_pb2


class EventStream:
    """A pool's events, batch by batch, in a `with` block that ends the watch.

    The first batch comes at once; empty ones are signs of life. Iterating raises PrefixdError:
    EVENTS_COMPACTED where events are gone (list again), EPOCH_STALE once the epoch has ended.
    """

    def __init__(
        self, call: StreamCall[events_pb2.WatchEventsResponse], *, with_token_ids: bool
    ) -> None:
        self._call = call
        self._parts = call.parts()
        self._with_token_ids = with_token_ids

    def __iter__(self) -> Iterator[Events]:
        return self

    def __next__(self) -> Events:
        return events_of(next(self._parts), with_token_ids=self._with_token_ids)

    def close(self) -> None:
        """Ends the watch; a thread that waits for its next batch gets an error."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncEventStream:
    """EventStream's twin for asyncio, in an `async with` block."""

    def __init__(
        self, call: AsyncStreamCall[events_pb2.WatchEventsResponse], *, with_token_ids: bool
    ) -> None:
        self._call = call
        self._parts = call.parts()
        self._with_token_ids = with_token_ids

    def __aiter__(self) -> AsyncIterator[Events]:
        return self

    async def __anext__(self) -> Events:
        return events_of(await anext(self._parts), with_token_ids=self._with_token_ids)

    def close(self) -> None:
        """Ends the watch."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
