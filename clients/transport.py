"""Runs calls over a channel, once for threads and once for asyncio.

Both transports raise the same typed errors and fill in the same deadline.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2

from prefixd.clients.calls import WATCH_EVENTS_PATH, Call, ResponseT, ResultT
from prefixd.clients.connection import Connection
from prefixd.clients.errors import PrefixdError, ServerUnreachable, error_of
from prefixd.clients.results import Page, RowT
from prefixd.clients.worker_calls import GENERATE_PATH
from prefixd.v1 import events_pb2, worker_pb2

HEALTH_WATCH_PATH = "/grpc.health.v1.Health/Watch"
"""Path of the standard health service's stream."""

ClientT = TypeVar("ClientT")


@dataclass(slots=True)
class Transport:
    """A synchronous channel to one server."""

    connection: Connection
    _channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        """Opens the channel, which connects with its first call."""
        self._channel = self.connection.open_channel()

    def call(self, call: Call[ResponseT, ResultT], *, timeout_s: float | None) -> ResultT:
        """Runs a unary call; `timeout_s` None is the connection's own deadline."""
        method = self._channel.unary_unary(
            call.method,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response_type.FromString,
        )
        try:
            return call.read(method(call.request, timeout=self._deadline_s(timeout_s)))
        except grpc.RpcError as error:
            raise error_of(error, address=self.connection.address) from error

    def rows(
        self, listing: Callable[[str], Call[ResponseT, Page[RowT]]], *, timeout_s: float | None
    ) -> Iterator[RowT]:
        """Yields all rows of a listing, page by page; `timeout_s` is for each page."""
        page_token = ""
        while True:
            page = self.call(listing(page_token), timeout_s=timeout_s)
            yield from page.rows
            page_token = page.next_page_token
            if not page_token:
                return

    def generate(
        self, request: worker_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> "StreamCall[worker_pb2.GenerateResponse]":
        """Starts an answer's stream; `timeout_s` None waits as long as the answer takes."""
        return self._stream(GENERATE_PATH, request, worker_pb2.GenerateResponse, timeout_s)

    def watch_events(
        self, request: events_pb2.WatchEventsRequest
    ) -> "StreamCall[events_pb2.WatchEventsResponse]":
        """Starts a watch, which has no deadline."""
        return self._stream(WATCH_EVENTS_PATH, request, events_pb2.WatchEventsResponse, None)

    def _stream(
        self, path: str, request: Message, response_type: type[ResponseT], timeout_s: float | None
    ) -> "StreamCall[ResponseT]":
        method = self._channel.unary_stream(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        return StreamCall(method(request, timeout=timeout_s), self.connection.address)

    def wait_until_serving(self, *, timeout_s: float) -> None:
        """Waits for the server's health to be SERVING; ServerUnreachable after `timeout_s`."""
        method = self._channel.unary_stream(
            HEALTH_WATCH_PATH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest()
        answers = method(request, timeout=timeout_s, wait_for_ready=True)
        try:
            for answer in answers:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    answers.cancel()  # type: ignore[no-untyped-call] # as below
                    return
        except grpc.RpcError as error:
            raise _not_serving(self.connection, timeout_s) from error
        raise _not_serving(self.connection, timeout_s)

    def close(self) -> None:
        """Closes the channel; running calls end."""
        self._channel.close()

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self.connection.timeout_s if timeout_s is None else timeout_s


@dataclass(slots=True)
class StreamCall(Generic[ResponseT]):
    """A running stream of a synchronous channel."""

    _call: "grpc.CallIterator[ResponseT]"
    _address: str

    def parts(self) -> Iterator[ResponseT]:
        """Yields the parts that are still to come."""
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise error_of(error, address=self._address) from error

    def cancel(self) -> None:
        """Ends the call; a worker closes the answer's sequence."""
        self._call.cancel()  # type: ignore[no-untyped-call] # grpc-stubs leave it bare


@dataclass(slots=True)
class AsyncTransport:
    """An asyncio channel to one server; made and used inside one running loop."""

    connection: Connection
    _channel: aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        """Opens the channel, which connects with its first call."""
        self._channel = self.connection.open_aio_channel()

    async def call(self, call: Call[ResponseT, ResultT], *, timeout_s: float | None) -> ResultT:
        """Runs a unary call; `timeout_s` None is the connection's own deadline."""
        method = self._channel.unary_unary(
            call.method,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response_type.FromString,
        )
        deadline_s = self.connection.timeout_s if timeout_s is None else timeout_s
        try:
            return call.read(await method(call.request, timeout=deadline_s))
        except grpc.RpcError as error:
            raise error_of(error, address=self.connection.address) from error

    async def rows(
        self, listing: Callable[[str], Call[ResponseT, Page[RowT]]], *, timeout_s: float | None
    ) -> AsyncIterator[RowT]:
        """Yields all rows of a listing, page by page; `timeout_s` is for each page."""
        page_token = ""
        while True:
            page = await self.call(listing(page_token), timeout_s=timeout_s)
            for row in page.rows:
                yield row
            page_token = page.next_page_token
            if not page_token:
                return

    def generate(
        self, request: worker_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> "AsyncStreamCall[worker_pb2.GenerateResponse]":
        """Starts an answer's stream; `timeout_s` None waits as long as the answer takes."""
        return self._stream(GENERATE_PATH, request, worker_pb2.GenerateResponse, timeout_s)

    def watch_events(
        self, request: events_pb2.WatchEventsRequest
    ) -> "AsyncStreamCall[events_pb2.WatchEventsResponse]":
        """Starts a watch, which has no deadline."""
        return self._stream(WATCH_EVENTS_PATH, request, events_pb2.WatchEventsResponse, None)

    def _stream(
        self, path: str, request: Message, response_type: type[ResponseT], timeout_s: float | None
    ) -> "AsyncStreamCall[ResponseT]":
        method = self._channel.unary_stream(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        return AsyncStreamCall(method(request, timeout=timeout_s), self.connection.address)

    async def wait_until_serving(self, *, timeout_s: float) -> None:
        """Waits for the server's health to be SERVING; ServerUnreachable after `timeout_s`."""
        method = self._channel.unary_stream(
            HEALTH_WATCH_PATH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest()
        answers = method(request, timeout=timeout_s, wait_for_ready=True)
        try:
            async for answer in answers:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    answers.cancel()
                    return
        except grpc.RpcError as error:
            raise _not_serving(self.connection, timeout_s) from error
        raise _not_serving(self.connection, timeout_s)

    async def close(self) -> None:
        """Closes the channel; running calls end."""
        await self._channel.close(None)


@dataclass(slots=True)
class AsyncStreamCall(Generic[ResponseT]):
    """A running stream of an asyncio channel."""

    _call: "aio.UnaryStreamCall[Any, ResponseT]"
    _address: str

    async def parts(self) -> AsyncIterator[ResponseT]:
        """Yields the parts that are still to come."""
        try:
            async for part in self._call:
                yield part
        except grpc.RpcError as error:
            raise error_of(error, address=self._address) from error

    def cancel(self) -> None:
        """Ends the call; a worker closes the answer's sequence."""
        self._call.cancel()


class SyncClient:
    """A client that closes its channel at the end of a `with` block."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def close(self) -> None:
        """Closes the channel; running calls end."""
        self._transport.close()

    def wait_until_serving(self, *, timeout_s: float) -> None:
        """Waits for the server's health to be SERVING; ServerUnreachable after `timeout_s`."""
        self._transport.wait_until_serving(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """A client that closes its channel at the end of an `async with` block."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def close(self) -> None:
        """Closes the channel; running calls end."""
        await self._transport.close()

    async def wait_until_serving(self, *, timeout_s: float) -> None:
        """Waits for the server's health to be SERVING; ServerUnreachable after `timeout_s`."""
        await self._transport.wait_until_serving(timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _not_serving(connection: Connection, timeout_s: float) -> PrefixdError:
    return ServerUnreachable(f"{connection.address} was not ready within {timeout_s:g} s")
