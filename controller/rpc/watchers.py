"""The open watches: which pools have some, and how they learn of changes and of their end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from prefixd.controller.core.errors import CacheError, EpochStale, LimitExceeded
from prefixd.controller.core.pool import Pool
from prefixd.controller.rpc.convert_events import events_message
from prefixd.v1 import events_pb2

WATCHERS_MAX = 256
"""Open watches of one controller."""
HEARTBEAT_S = 5.0
"""After this long without events a watcher gets an empty response."""
EVENTS_PER_RESPONSE_MAX = 256
EVENT_BYTES_PER_RESPONSE = 1024 * 1024
"""A response takes no further event once it has this many bytes of digests, tokens and keys."""


class Watch:
    """One open watch. Its queue is the pool's event log: it holds nothing but its place there."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.changed = asyncio.Event()
        self.ending: CacheError | None = None

    async def follow(
        self, after_revision: int, *, with_token_ids: bool, heartbeat_s: float
    ) -> AsyncIterator[events_pb2.WatchEventsResponse]:
        """Sends the first response at once, then events as they come, then raises the ending.

        Raises EventsCompacted where the next event is no longer kept, FieldInvalid for a revision
        that is not reached.
        """
        revision = after_revision
        must_send = True
        while True:
            self.changed.clear()
            events = self.pool.events.after(
                revision,
                count_max=EVENTS_PER_RESPONSE_MAX,
                byte_count_max=EVENT_BYTES_PER_RESPONSE,
            )
            if events or must_send:
                revision += len(events)
                must_send = False
                yield events_message(
                    self.pool, events, through_revision=revision, with_token_ids=with_token_ids
                )
                continue
            if self.ending is not None:
                raise self.ending
            try:
                await asyncio.wait_for(self.changed.wait(), heartbeat_s)
            except TimeoutError:
                must_send = True


class Watchers:
    """Knows the open watches by pool name."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}
        self._ending: CacheError | None = None

    @property
    def count(self) -> int:
        """Open watches."""
        return sum(map(len, self._watches.values()))

    @contextmanager
    def watching(self, pool: Pool) -> Iterator[Watch]:
        """Keeps a watch open for the length of the block. Raises LimitExceeded, or the ending."""
        if self._ending is not None:
            raise self._ending
        if self.count >= WATCHERS_MAX:
            raise LimitExceeded(
                f"{WATCHERS_MAX} watches are open", numbers={"watchers_max": WATCHERS_MAX}
            )
        name = pool.spec.pool_name
        watch = Watch(pool)
        self._watches.setdefault(name, set()).add(watch)
        try:
            yield watch
        finally:
            watches = self._watches[name]
            watches.remove(watch)
            if not watches:
                del self._watches[name]

    def notify(self, pool: Pool) -> None:
        """Says that a pool may have new events."""
        for watch in self._watches.get(pool.spec.pool_name, ()):
            watch.changed.set()

    def end_epoch(self, pool_name: str, epoch: int, reason: CacheError) -> None:
        """Ends the watches of an epoch."""
        for watch in self._watches.get(pool_name, ()):
            if watch.pool.epoch == epoch:
                _end(watch, reason)

    def end_older(self, pool: Pool) -> None:
        """Ends the watches of a pool's earlier epochs: a new one has begun."""
        for watch in self._watches.get(pool.spec.pool_name, ()):
            if watch.pool is not pool:
                _end(watch, epoch_ended(watch.pool))

    def end_all(self, reason: CacheError) -> None:
        """Ends every watch, and refuses new ones from now on."""
        self._ending = reason
        for watches in self._watches.values():
            for watch in watches:
                _end(watch, reason)


def epoch_ended(pool: Pool) -> EpochStale:
    """Returns the error that ends what belongs to an epoch."""
    return EpochStale(
        f"epoch {pool.epoch} of pool {pool.spec.pool_name!r} has ended",
        numbers={"epoch": pool.epoch},
    )


def _end(watch: Watch, reason: CacheError) -> None:
    if watch.ending is None:
        watch.ending = reason
    watch.changed.set()
