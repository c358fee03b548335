"""The core's errors as gRPC statuses and as in-band errors of a session."""

from types import MappingProxyType

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from prefixd.controller.core.errors import CacheError
from prefixd.controller.rpc.convert_reply import reason_value
from prefixd.v1 import cache_pb2

ERROR_DOMAIN = "prefixd"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_BYTES_MAX = 1_000
"""Text of a status. Trailers of 8 KiB are refused, and all that an error says with them; the text
stands in them three times, once escaped."""
RETRY_DELAY_MS = 50
"""Hint for callers whose call may succeed a moment later."""

CODES = MappingProxyType(
    {
        "TOKEN_ID_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "PAGE_TOKEN_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_EMPTY": grpc.StatusCode.INVALID_ARGUMENT,
        "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
        "POOL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "SEQUENCE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "BLOCK_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "POOL_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
        "SEQUENCE_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
        "NOT_POOL_DRIVER": grpc.StatusCode.FAILED_PRECONDITION,
        "SESSION_ACTIVE": grpc.StatusCode.FAILED_PRECONDITION,
        "BLOCKS_IN_USE": grpc.StatusCode.FAILED_PRECONDITION,
        "SEQUENCE_EXCEEDS_POOL": grpc.StatusCode.FAILED_PRECONDITION,
        "EPOCH_STALE": grpc.StatusCode.ABORTED,
        "STEP_OUT_OF_ORDER": grpc.StatusCode.ABORTED,
        "POSITION_MISMATCH": grpc.StatusCode.ABORTED,
        "POOL_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "STEPS_IN_FLIGHT": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOKEN_BUDGET": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "EVENTS_COMPACTED": grpc.StatusCode.OUT_OF_RANGE,
        "COPY_IN_SAME_STEP": grpc.StatusCode.UNAVAILABLE,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "INVARIANT_BROKEN": grpc.StatusCode.INTERNAL,
        "INTERNAL_FAILURE": grpc.StatusCode.INTERNAL,
    }
)
"""The canonical code of each reason that can end a call."""

REASONS_TO_RETRY = frozenset({"POOL_EXHAUSTED", "STEPS_IN_FLIGHT", "DRAINING"})
"""Reasons that pass by themselves; their statuses carry a RetryInfo."""


class InternalFailure(CacheError):
    """The server failed in a way that no other reason names; its log holds the cause."""

    reason = "INTERNAL_FAILURE"


def error_status(error: CacheError) -> Status:
    """Converts an error to a status with exactly one ErrorInfo, and the standard details.

    A field error adds a BadRequest, a busy pool a PreconditionFailure, a passing shortage a
    RetryInfo.
    """
    message = _shortened(error.message)
    status = Status(code=_code_number(error), message=message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=ERROR_DOMAIN, metadata=error_metadata(error)
        )
    )
    if error.field:
        status.details.add().Pack(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=error.field, description=message
                    )
                ]
            )
        )
    if error.reason == "BLOCKS_IN_USE":
        status.details.add().Pack(
            error_details_pb2.PreconditionFailure(
                violations=[
                    error_details_pb2.PreconditionFailure.Violation(
                        type=error.reason, description=message
                    )
                ]
            )
        )
    if error.reason in REASONS_TO_RETRY:
        status.details.add().Pack(
            error_details_pb2.RetryInfo(retry_delay=Duration(nanos=RETRY_DELAY_MS * 1_000_000))
        )
    return status


def step_error(error: CacheError, *, step_id: int) -> cache_pb2.StepError:
    """Converts the error of a refused step to its in-band form."""
    return cache_pb2.StepError(
        step_id=step_id,
        code=_code_number(error),
        reason=reason_value(error.reason),
        message=error.message,
        metadata=error_metadata(error),
        field=error.field,
    )


def error_metadata(error: CacheError) -> dict[str, str]:
    """Every number of the message by name, as strings."""
    return {name: str(number) for name, number in error.numbers.items()}


def error_code(error: CacheError) -> grpc.StatusCode:
    """The canonical code of an error."""
    return CODES[error.reason]


def _code_number(error: CacheError) -> int:
    number: int = error_code(error).value[0]
    return number


def _shortened(message: str) -> str:
    """Cut out the middle of a text that a caller's own words have made too long."""
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    kept = (MESSAGE_BYTES_MAX - len(" ... ")) // 2
    start, end = encoded[:kept], encoded[-kept:]
    return f"{start.decode(errors='ignore')} ... {end.decode(errors='ignore')}"
