"""Applying steps for the stream and its unary twin alike."""

from weakref import WeakKeyDictionary

from prefixd.controller.core.limits import STEPS_IN_FLIGHT_MAX
from prefixd.controller.core.messages import StepReply
from prefixd.controller.core.pool import Pool
from prefixd.controller.rpc.convert_reply import step_message
from prefixd.controller.rpc.convert_step import step_value
from prefixd.controller.rpc.epochs import Epochs
from prefixd.controller.rpc.hashing import SlicedHashing
from prefixd.v1 import cache_pb2

KeptReplies = dict[int, tuple[StepReply, cache_pb2.StepResponse]]


class StepRunner:
    """Converts a step, applies it, and converts its reply.

    Invariants: between the conversions nothing awaits, so a step is applied whole or not at all.
    The message of a reply that the core keeps is kept beside it, and goes with its pool.
    """

    def __init__(self, epochs: Epochs, hashing: SlicedHashing) -> None:
        self._epochs = epochs
        self._hashing = hashing
        self._kept: WeakKeyDictionary[Pool, KeptReplies] = WeakKeyDictionary()

    def apply(
        self, pool: Pool, request: cache_pb2.StepRequest, *, now_ms: int
    ) -> cache_pb2.StepResponse:
        """Applies a step. Raises CacheError; an InvariantBroken has ended the pool's epoch."""
        step = step_value(request)
        with self._epochs.ended_by_failure(pool):
            reply = pool.apply_step(step, now_ms=now_ms)
        self._hashing.start(pool)
        return self._message(pool, reply)

    def _message(self, pool: Pool, reply: StepReply) -> cache_pb2.StepResponse:
        kept_replies = self._kept.setdefault(pool, {})
        kept = kept_replies.get(reply.step_id)
        if kept is not None and kept[0] is reply:
            return kept[1]
        message = step_message(reply)
        kept_replies[reply.step_id] = (reply, message)
        kept_replies.pop(reply.step_id - STEPS_IN_FLIGHT_MAX, None)
        return message
