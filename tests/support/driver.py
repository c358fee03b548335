"""A driver for tests, written on the raw stubs: it registers a pool, numbers steps, sends them."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from prefixd.v1 import cache_pb2, inspect_pb2, pool_pb2, types_pb2
from tests.support.controller import Stubs

CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CallError:
    """What a failed call says: its code, its text, and its decoded details."""

    code: grpc.StatusCode
    message: str
    reason: str
    domain: str
    metadata: dict[str, str]
    fields: tuple[str, ...]
    detail_names: tuple[str, ...]


def call_error(error: grpc.RpcError) -> CallError:
    """Decodes the status of a failed call; it must hold exactly one ErrorInfo."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no status details: {error}"
    infos = [
        detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    ]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    fields: list[str] = []
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            fields.extend(violation.field for violation in bad.field_violations)
    return CallError(
        code=error.code(),
        message=status.message,
        reason=info.reason,
        domain=info.domain,
        metadata=dict(info.metadata),
        fields=tuple(fields),
        detail_names=tuple(detail.TypeName().rpartition(".")[2] for detail in status.details),
    )


def refused(call: Callable[[], Any]) -> CallError:
    """Makes a call that must fail and returns its error."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return call_error(raised.value)


def open_entry(
    handle: int, token_ids: Sequence[int], *, sequence_id: str = "", **fields: Any
) -> cache_pb2.StepEntry:
    """Makes an open entry; the sequence is named after its handle unless it has a name."""
    return cache_pb2.StepEntry(
        open=cache_pb2.OpenEntry(
            handle=handle,
            sequence_id=sequence_id or f"sequence-{handle}",
            token_ids=token_ids,
            **fields,
        )
    )


def extend_entry(
    handle: int, *, known: int, scheduled: int, token_ids: Sequence[int] = (), **fields: Any
) -> cache_pb2.StepEntry:
    """Makes an extend entry; `known` and `scheduled` are the counts before it."""
    return cache_pb2.StepEntry(
        extend=cache_pb2.ExtendEntry(
            handle=handle,
            known_count_before=known,
            scheduled_count_before=scheduled,
            token_ids=token_ids,
            **fields,
        )
    )


def decode_entry(*rows: tuple[int, int, int]) -> cache_pb2.StepEntry:
    """Makes a decode entry of rows (handle, position, token): one token per row."""
    return cache_pb2.StepEntry(
        decode=cache_pb2.DecodeEntry(
            handles=[handle for handle, _, _ in rows],
            scheduled_count_before=[position for _, position, _ in rows],
            known_count_before=[position for _, position, _ in rows],
            token_counts=[1 for _ in rows],
            token_ids=[token_id for _, _, token_id in rows],
        )
    )


def fork_entry(parent: int, child: int, *, token_count: int) -> cache_pb2.StepEntry:
    """Makes a fork entry; the child is named after its handle."""
    return cache_pb2.StepEntry(
        fork=cache_pb2.ForkEntry(
            parent_handle=parent,
            child_handle=child,
            child_sequence_id=f"sequence-{child}",
            token_count=token_count,
        )
    )


def close_entry(
    handle: int,
    reason: types_pb2.CloseReason.ValueType = types_pb2.CLOSE_REASON_FINISHED,
    **fields: Any,
) -> cache_pb2.StepEntry:
    """Makes a close entry."""
    return cache_pb2.StepEntry(close=cache_pb2.CloseEntry(handle=handle, reason=reason, **fields))


class Driver:
    """The driver of one pool. Every step confirms all earlier ones unless told otherwise."""

    def __init__(self, stubs: Stubs, pool_name: str = "pool", **fields: Any) -> None:
        self.stubs = stubs
        self.pool_name = pool_name
        fields = {"block_count": 64, "block_size": 4} | fields
        self.registered = stubs.pool.RegisterPool(
            pool_pb2.RegisterPoolRequest(pool_name=pool_name, **fields)
        )
        self.applied_step_id = 0

    @property
    def key(self) -> dict[str, Any]:
        """The fields that mutating calls carry."""
        return {
            "pool_name": self.pool_name,
            "epoch": self.registered.epoch,
            "session_token": self.registered.session_token,
        }

    def request(self, *entries: cache_pb2.StepEntry, **fields: Any) -> cache_pb2.StepRequest:
        """Makes the next step."""
        step = self.key | {
            "step_id": self.applied_step_id + 1,
            "executed_step_id": self.applied_step_id,
        }
        return cache_pb2.StepRequest(entries=entries, **(step | fields))

    def step(self, *entries: cache_pb2.StepEntry, **fields: Any) -> cache_pb2.StepResponse:
        """Makes the next step, sends it as a unary call, and counts it once it is applied."""
        request = self.request(*entries, **fields)
        response: cache_pb2.StepResponse = self.stubs.cache.Step(request, timeout=CALL_TIMEOUT_S)
        self.applied_step_id = request.step_id
        return response


class SessionClient:
    """The client's end of one session stream."""

    def __init__(self, stubs: Stubs) -> None:
        self._requests: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        self.call = stubs.cache.Session(iter(self._requests.get, None), timeout=CALL_TIMEOUT_S)

    def send(self, request: cache_pb2.SessionRequest) -> None:
        """Sends a message."""
        self._requests.put(request)

    def send_step(self, step: cache_pb2.StepRequest) -> None:
        """Sends a step."""
        self.send(cache_pb2.SessionRequest(step=step))

    def receive(self) -> cache_pb2.SessionResponse:
        """Waits for the next message. Raises grpc.RpcError where the stream failed."""
        response: cache_pb2.SessionResponse = next(self.call)
        return response

    def start(self, driver: Driver) -> cache_pb2.SessionReady:
        """Sends the start and waits for ready."""
        self.send(cache_pb2.SessionRequest(start=cache_pb2.SessionStart(**driver.key)))
        response = self.receive()
        assert response.WhichOneof("message") == "ready"
        return response.ready

    def step(self, step: cache_pb2.StepRequest) -> cache_pb2.StepResponse:
        """Sends a step that must be applied and waits for its answer."""
        self.send_step(step)
        response = self.receive()
        assert response.WhichOneof("message") == "step", response
        return response.step

    def finish(self) -> None:
        """Says that nothing more will be sent, and waits for the end of the stream."""
        self._requests.put(None)
        for _ in self.call:
            pass

    def cancel(self) -> None:
        """Breaks the stream."""
        self.call.cancel()
        self._requests.put(None)


def wait_session_ended(driver: Driver) -> None:
    """Waits until the controller has seen the end of the pool's stream."""
    request = inspect_pb2.GetPoolRequest(pool_name=driver.pool_name)
    while driver.stubs.inspect.GetPool(request).pool.session_active:
        pass


@contextmanager
def session(driver: Driver) -> Iterator[SessionClient]:
    """Runs a started session for the length of the block, then breaks it."""
    client = SessionClient(driver.stubs)
    try:
        client.start(driver)
        yield client
    finally:
        client.cancel()
