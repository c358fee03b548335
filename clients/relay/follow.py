"""Follows a pool across epochs, restarts and lost connections, and publishes what happens."""

import asyncio

from prefixd.clients.controller_client import AsyncControllerClient
from prefixd.clients.errors import PrefixdError, ServerUnreachable
from prefixd.clients.events import Watched
from prefixd.clients.relay.publisher import Publisher
from prefixd.clients.relay.vllm_events import CLEARED, HashForm, vllm_events

RETRY_S = 1.0
"""Pause before a lost controller or pool is looked for again."""
REASONS_TO_RETRY = frozenset({"POOL_NOT_FOUND", "DRAINING", "LIMIT_EXCEEDED"})
"""Refusals that pass: the pool may be registered again, the controller started again."""


class Relay:
    """Publishes one pool's events.

    Invariants: what was published, applied in order, is what the pool holds, as far as events are
    kept; wherever that cannot go on (a new epoch, events that are gone) everything is cleared
    first, and consumers miss blocks rather than believe in blocks that are gone.
    """

    def __init__(
        self,
        client: AsyncControllerClient,
        publisher: Publisher,
        *,
        pool_name: str,
        form: HashForm,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._pool_name = pool_name
        self._form = form
        self._epoch: int | None = None
        self._revision = 0

    async def run(self) -> None:
        """Publishes until cancelled; where following or replaying fails, both end.

        Raises PrefixdError for a refusal that does not pass, zmq.ZMQError for a socket that failed.
        """
        replaying = asyncio.create_task(self._publisher.serve_replay())
        following = asyncio.create_task(self._follow_for_ever())
        try:
            # Replay ends at once where none is offered; following only ever fails.
            await asyncio.wait((following, replaying), return_when=asyncio.FIRST_EXCEPTION)
            for task in (following, replaying):
                if task.done():
                    task.result()
        finally:
            following.cancel()
            replaying.cancel()
            await asyncio.gather(following, replaying, return_exceptions=True)

    async def _follow_for_ever(self) -> None:
        while True:
            await self._follow_and_recover()

    async def _follow_and_recover(self) -> None:
        try:
            await self._follow()
        except ServerUnreachable:
            await asyncio.sleep(RETRY_S)
        except PrefixdError as error:
            if error.reason == "EPOCH_STALE" or error.field == "after_revision":
                self._epoch, self._revision = None, 0
            elif error.reason == "EVENTS_COMPACTED":
                await self._publisher.publish([CLEARED])
                self._revision = int(error.metadata["oldest_revision"]) - 1
            elif error.reason in REASONS_TO_RETRY:
                await asyncio.sleep(RETRY_S)
            else:
                raise

    async def _follow(self) -> None:
        watched = Watched(
            self._pool_name,
            epoch=self._epoch,
            after_revision=self._revision,
            with_token_ids=True,
        )
        groups = (await self._client.pool(self._pool_name)).groups
        async with self._client.watch_events(watched) as batches:
            async for batch in batches:
                if self._epoch is None:
                    await self._publisher.publish([CLEARED])
                self._epoch = batch.epoch
                self._revision = batch.through_revision
                events = vllm_events(batch.events, form=self._form, groups=groups)
                if events:
                    await self._publisher.publish(events)
