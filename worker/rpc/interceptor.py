"""The outermost layer of every call: errors become statuses."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from prefixd.worker.errors import WorkerError, field_invalid, internal_failure
from prefixd.worker.logs import Log
from prefixd.worker.rpc.status import STATUS_DETAILS_KEY, error_code, error_status

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Any]
Deserializer = Callable[[bytes], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Turns whatever a handler raises into a status with one ErrorInfo.

    Invariants: a caller sees the text of typed errors only; anything else that is raised is logged
    and leaves as INTERNAL / INTERNAL_FAILURE without its text.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of the called method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        # One of these, by the method's shape; the constructors are gRPC's.
        factories = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        factory, behavior = factories[handler.request_streaming, handler.response_streaming]
        guard = self._guard_stream if inspect.isasyncgenfunction(behavior) else self._guard_call
        deserializer = handler.request_deserializer
        if not handler.request_streaming:
            # A stream's handler reads by itself, so it sees what a read raises.
            deserializer = _parse(deserializer)
        return factory(
            guard(behavior, method),
            request_deserializer=deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard_call(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                _check_parsed(request)
                response = await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                return await self._abort(error, context, method)
            self._log.debug("rpc", method=method, code="OK")
            return response

        return guarded

    def _guard_stream(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            responses = behavior(request, context)
            try:
                _check_parsed(request)
                async for response in responses:
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await self._abort(error, context, method)
            else:
                self._log.debug("rpc", method=method, code="OK")
            finally:
                # A cancelled call ends here; its handler must let go now, not when it is collected.
                await responses.aclose()

        return guarded

    async def _abort(self, error: Exception, context: Context, method: str) -> None:
        if isinstance(error, DecodeError):
            error = field_invalid("", "the request's bytes are not a message of the method's type")
        elif not isinstance(error, WorkerError):
            self._log.error("rpc_failed", method=method, exc_info=error)
            error = internal_failure("the worker failed; its log holds the cause")
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
