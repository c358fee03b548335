"""The open sessions: which pools have one, and how they are told to end."""

import asyncio

from prefixd.controller.core.errors import CacheError


class OpenSessions:
    """Knows the open session of each epoch by the future that ends it."""

    def __init__(self) -> None:
        self._endings: dict[int, asyncio.Future[CacheError]] = {}

    def add(self, epoch: int) -> "asyncio.Future[CacheError]":
        """Enters a session; the returned future says when and why it must end."""
        assert epoch not in self._endings
        ending = asyncio.get_running_loop().create_future()
        self._endings[epoch] = ending
        return ending

    def remove(self, epoch: int) -> None:
        """Strikes a session that has ended."""
        del self._endings[epoch]

    def end(self, epoch: int, reason: CacheError) -> None:
        """Tells the epoch's session to say goodbye, if there is one."""
        ending = self._endings.get(epoch)
        if ending is not None and not ending.done():
            ending.set_result(reason)

    def end_all(self, reason: CacheError) -> None:
        """Tells every session to say goodbye."""
        for epoch in tuple(self._endings):
            self.end(epoch, reason)
