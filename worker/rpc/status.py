"""The worker's errors as gRPC statuses."""

from types import MappingProxyType

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from prefixd.worker.errors import WorkerError

ERROR_DOMAIN = "prefixd"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_BYTES_MAX = 1_000
"""Text of a status. Trailers of 8 KiB are refused, and all that an error says with them; the text
stands in them three times, once escaped."""
RETRY_DELAY_MS = 500
"""Hint for callers whose call may succeed later."""

CODES = MappingProxyType(
    {
        "TOKEN_ID_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_EMPTY": grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_LENGTH_EXCEEDED": grpc.StatusCode.INVALID_ARGUMENT,
        "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
        "SEQUENCE_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
        "SEQUENCE_EXCEEDS_POOL": grpc.StatusCode.FAILED_PRECONDITION,
        "WEIGHTS_UNUSABLE": grpc.StatusCode.FAILED_PRECONDITION,
        "POOL_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "CONTROLLER_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
        "INTERNAL_FAILURE": grpc.StatusCode.INTERNAL,
    }
)
"""The canonical code of each reason that ends a call. A reason that the controller gave and that
stands not here means that the two disagree: INTERNAL."""

REASONS_TO_RETRY = frozenset({"POOL_EXHAUSTED", "DRAINING", "CONTROLLER_UNAVAILABLE"})
"""Reasons that pass by themselves; their statuses carry a RetryInfo."""


def error_code(error: WorkerError) -> grpc.StatusCode:
    """The canonical code of an error."""
    return CODES.get(error.reason, grpc.StatusCode.INTERNAL)


def _as_text(number: int | float) -> str:
    """As the message writes it, a whole float like an integer."""
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return str(number)


def error_status(error: WorkerError) -> Status:
    """Converts an error to a status with exactly one ErrorInfo.

    A field error adds a BadRequest, a passing trouble a RetryInfo.
    """
    message = _shortened(error.message)
    status = Status(code=error_code(error).value[0], message=message)
    metadata = {name: _as_text(number) for name, number in error.numbers.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.reason in REASONS_TO_RETRY:
        delay = Duration()
        delay.FromMilliseconds(RETRY_DELAY_MS)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _shortened(message: str) -> str:
    """Cut out the middle of a text that a caller's own words have made too long."""
    encoded = message.encode()
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return message
    kept = (MESSAGE_BYTES_MAX - len(" ... ")) // 2
    start, end = encoded[:kept], encoded[-kept:]
    return f"{start.decode(errors='ignore')} ... {end.decode(errors='ignore')}"
