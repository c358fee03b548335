"""Applying steps for the stream and its unary twin alike."""

from prefixd.controller.core.pool import Pool
from prefixd.controller.rpc.convert_reply import session_message
from prefixd.controller.rpc.convert_step import step_value
from prefixd.controller.rpc.epochs import Epochs
from prefixd.controller.rpc.hashing import SlicedHashing
from prefixd.v1 import cache_pb2


class StepRunner:
    """Converts a step, applies it, and converts its reply.

    Invariants: between the conversions nothing awaits, so a step is applied whole or not at all.
    """

    def __init__(self, epochs: Epochs, hashing: SlicedHashing) -> None:
        self._epochs = epochs
        self._hashing = hashing

    def apply(
        self, pool: Pool, request: cache_pb2.StepRequest, *, now_ms: int
    ) -> cache_pb2.SessionResponse:
        """Applies a step. Raises CacheError; an InvariantBroken has ended the pool's epoch."""
        step = step_value(request)
        with self._epochs.ended_by_failure(pool):
            reply = pool.apply_step(step, now_ms=now_ms)
        self._hashing.start(pool)
        return session_message(reply)
