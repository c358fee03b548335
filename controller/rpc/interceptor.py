"""The outermost layer of every call: errors become statuses, and each call leaves a debug line."""

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from structlog.typing import FilteringBoundLogger

from prefixd.controller.core.errors import CacheError, FieldInvalid
from prefixd.controller.rpc.status import (
    STATUS_DETAILS_KEY,
    InternalFailure,
    error_code,
    error_status,
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Any]
Deserializer = Callable[[bytes], Any]
MethodHandler = Any
"""What gRPC calls a method's handler; its class is generic in the stubs only."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Turns whatever a handler raises into a status with one ErrorInfo.

    Invariants: a caller sees the text of typed errors only; anything else that is raised is logged
    and leaves as INTERNAL / INTERNAL_FAILURE without its text.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._wrapped: dict[str, MethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of the called method, once per method."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrap(handler, method)
            self._wrapped[method] = wrapped
        return wrapped

    def _wrap(self, handler: Any, method: str) -> MethodHandler:
        if handler.request_streaming:
            factory, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            factory, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            factory, behavior = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        guarded = (
            self._guard_generator(behavior, method)
            if inspect.isasyncgenfunction(behavior)
            else self._guard_coroutine(behavior, method)
        )
        deserializer = handler.request_deserializer
        if not handler.request_streaming:
            # A stream's handler reads by itself, so it sees what a read raises.
            deserializer = _parse(deserializer)
        return factory(
            guarded,
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard_coroutine(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            started = time.perf_counter()
            try:
                _check_parsed(request)
                response = await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                return await self._abort(error, context, method)
            elapsed_us = round((time.perf_counter() - started) * 1e6)
            self._log.debug("rpc", method=method, code="OK", elapsed_us=elapsed_us)
            return response

        return guarded

    def _guard_generator(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                _check_parsed(request)
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await self._abort(error, context, method)
            else:
                self._log.debug("rpc", method=method, code="OK")

        return guarded

    async def _abort(self, error: Exception, context: Context, method: str) -> None:
        if isinstance(error, DecodeError):
            error = FieldInvalid("the request's bytes are not a message of the method's type")
        elif not isinstance(error, CacheError):
            self._log.error("rpc_failed", method=method, exc_info=error)
            error = InternalFailure("the controller failed; its log holds the cause")
        code = error_code(error)
        self._log.debug("rpc", method=method, code=code.name, reason=error.reason)
        status = error_status(error)
        await context.abort(
            code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        )


def _parse(deserializer: Deserializer) -> Deserializer:
    """Makes an unreadable message its DecodeError: raised here it would leave as UNKNOWN."""

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return error

    return parse


def _check_parsed(request: Any) -> None:
    if isinstance(request, DecodeError):
        raise request
