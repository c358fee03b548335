"""The ZeroMQ end: numbered batches on a PUB socket, and past ones on request."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio

SEQUENCE_BYTES = 8
"""Length of a batch's number on the wire, big-endian."""
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""What stands for the number behind the last replayed batch; its payload is empty."""
LINGER_MS = 500
"""How long unsent messages hold up the end of the process."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Where and how batches are published; `replay_endpoint` None offers no replay."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    data_parallel_rank: int
    batches_kept_max: int


class Publisher:
    """Publishes batches and remembers the last ones; made inside a running event loop.

    Invariant: numbers ascend by one from 0, so a subscriber sees what it missed.
    """

    def __init__(self, publication: Publication, *, clock: Callable[[], float]) -> None:
        """Binds the sockets. Raises zmq.ZMQError where an endpoint cannot be bound."""
        self._publication = publication
        self._clock = clock
        self._next_number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=publication.batches_kept_max)
        self._context = zmq.asyncio.Context()
        self._publishing = self._bound(zmq.PUB, publication.endpoint)
        self._replaying = (
            None
            if publication.replay_endpoint is None
            else self._bound(zmq.ROUTER, publication.replay_endpoint)
        )

    def _bound(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.bind(endpoint)
        return socket

    @property
    def endpoint(self) -> str:
        """Where subscribers connect."""
        return _endpoint_of(self._publishing)

    @property
    def replay_endpoint(self) -> str | None:
        """Where past batches are asked for."""
        return None if self._replaying is None else _endpoint_of(self._replaying)

    async def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Publishes one batch: topic, number, and msgpack of [time, events, rank]."""
        payload: bytes = msgpack.packb(
            [self._clock(), list(events), self._publication.data_parallel_rank]
        )
        number = self._next_number
        self._next_number += 1
        self._kept.append((number, payload))
        topic = self._publication.topic.encode()
        await self._publishing.send_multipart((topic, _packed(number), payload))

    async def serve_replay(self) -> None:
        """Answers requests for past batches until cancelled; returns at once without replay.

        A request is the first wanted number in 8 bytes, behind an empty frame. The answer is every
        kept batch from there on, each as number and payload, then END_OF_REPLAY. A request of
        another shape is not answered.
        """
        if self._replaying is None:
            return
        while True:
            frames = await self._replaying.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                continue
            address, start = frames[:2], int.from_bytes(frames[2], "big")
            for number, payload in tuple(self._kept):
                if number >= start:
                    await self._replaying.send_multipart((*address, _packed(number), payload))
            await self._replaying.send_multipart((*address, END_OF_REPLAY, b""))

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=LINGER_MS)


def _packed(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


def _endpoint_of(socket: zmq.asyncio.Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode()
