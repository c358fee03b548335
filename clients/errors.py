"""What a client raises: one base class, and few kinds below it."""

from collections.abc import Mapping
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "prefixd"
"""Domain of the ErrorInfo that every refused call carries."""


class PrefixdError(Exception):
    """Base of all errors of the clients.

    `reason` is the contract: the name of a `prefixd.v1.ErrorReason` without its prefix, or empty
    where no prefixd server refused the call. `code` is the canonical gRPC code's name, empty where
    no call was made; `metadata` holds every number of the message; `field` is the path of the
    offending field, empty where the error concerns none.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field = field


class AddressInvalid(PrefixdError):
    """An address is neither `host:port` nor `unix:/path`; nothing was sent."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"address {address!r} {problem}")
        self.address = address


class RequestInvalid(PrefixdError):
    """A value is out of its field's range, or is text that cannot be sent; nothing was sent."""


class CallRefused(PrefixdError):
    """A prefixd server refused the call and said why: `reason` is set."""


class ServerUnreachable(PrefixdError):
    """Nobody answers at the address, or the connection broke."""


class DeadlinePassed(PrefixdError):
    """The answer did not come in time."""


class AnswerIncomplete(PrefixdError):
    """An answer's stream ended before the answer was complete."""


def error_of(error: grpc.RpcError, *, address: str) -> PrefixdError:
    """Turns what gRPC raised in a call to `address` into a typed error."""
    # What gRPC raises from a call has the call's accessors, in asyncio as well.
    call = cast(grpc.Call, error)
    code = call.code()
    text = call.details() or ""
    status = rpc_status.from_call(call)
    if status is not None:
        info = _error_info(status)
        if info is not None and info.domain == ERROR_DOMAIN:
            return CallRefused(
                text,
                code=code.name,
                reason=info.reason,
                metadata=info.metadata,
                field=_field(status),
            )
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachable(f"no server answers at {address}: {_cause(text)}", code=code.name)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{address} did not answer in time", code=code.name)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PrefixdError(f"{address} does not offer this call: {text}", code=code.name)
    return PrefixdError(f"{address}: {code.name}: {text}", code=code.name)


def _error_info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None


def _field(status: status_pb2.Status) -> str:
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            return str(bad_request.field_violations[0].field)
    return ""


def _cause(text: str) -> str:
    """Keeps the last clause of gRPC's nested connection errors: the operating system's words."""
    if "security handshaker" in text:
        return "TLS cannot begin: an authority, certificate or key file is not usable PEM"
    if "handshake" in text.lower():
        # The last clause is of the TLS library, and may even read "OK".
        return "the TLS handshake failed (does it serve TLS? do both trust the certificates?)"
    return text.rpartition(": ")[2].strip(" ]") or "connection lost"
