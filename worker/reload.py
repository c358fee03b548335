"""Putting other weights in the place of a running model's."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prefixd.worker.errors import WorkerError, field_invalid
from prefixd.worker.limits import MODEL_VERSION_LENGTH_MAX
from prefixd.worker.logs import Log
from prefixd.worker.model.errors import WeightsUnusable


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Other weights are in place, and the controller knows."""

    previous_model_version: str
    dropped_block_count: int


@dataclass(slots=True, eq=False)
class WeightChange:
    """Weights that wait for the end of a step.

    Attributes:
        model_version: of the new weights.
        put_in_place: replaces the weights; called while no pass runs.
        is_in_place: whether that has happened.
        stated: the number of blocks that the controller dropped, once it knows the version.
    """

    model_version: str
    put_in_place: Callable[[], None]
    stated: asyncio.Future[int]
    is_in_place: bool = False


class ModelWeights(Protocol):
    """The weights of one running model."""

    def read(self, folder: str) -> Mapping[str, Any]:
        """Reads weights that fit the model; empty names the folder of the last ones read.

        Raises:
            WeightsUnusable: they cannot be read or do not fit.
        """
        ...

    def replace(self, weights: Mapping[str, Any]) -> None:
        """Puts weights in place."""
        ...


class WeightTaker(Protocol):
    """Who runs passes with the weights."""

    @property
    def model_version(self) -> str:
        """Version of the weights in place."""
        ...

    async def change_weights(self, model_version: str, put_in_place: Callable[[], None]) -> int:
        """Puts weights in place between two steps, and states their version.

        Returns:
            The number of blocks that the controller dropped.

        Raises:
            WorkerError: DRAINING or CONTROLLER_UNAVAILABLE; nothing has changed.
        """
        ...


class WeightReloader:
    """Reads weights while passes run, and hands them over; one reload at a time."""

    def __init__(self, taker: WeightTaker, weights: ModelWeights, log: Log) -> None:
        self._taker = taker
        self._weights = weights
        self._log = log
        self._lock = asyncio.Lock()

    async def reload(self, *, model_version: str, folder: str) -> Reloaded:
        """Replaces the weights by those of a folder.

        Raises:
            WorkerError: FIELD_INVALID, WEIGHTS_UNUSABLE, DRAINING or CONTROLLER_UNAVAILABLE; the
                old weights are in place then.
        """
        length = len(model_version)
        if not 1 <= length <= MODEL_VERSION_LENGTH_MAX:
            raise field_invalid(
                "model_version",
                f"a model version of {length} characters, but 1 to {MODEL_VERSION_LENGTH_MAX} are"
                " taken",
                numbers={"length": length, "length_max": MODEL_VERSION_LENGTH_MAX},
            )
        async with self._lock:
            previous = self._taker.model_version
            if model_version == previous:
                raise field_invalid(
                    "model_version",
                    f"the weights in use are called {previous!r} already; other ones need another"
                    " version",
                )
            try:
                weights = await asyncio.to_thread(self._weights.read, folder)
            except WeightsUnusable as error:
                raise WorkerError("WEIGHTS_UNUSABLE", str(error), field="folder") from error
            self._log.debug("weights_read", model_version=model_version)
            dropped_block_count = await self._taker.change_weights(
                model_version, lambda: self._weights.replace(weights)
            )
        self._log.info("weights_reloaded", model_version=model_version, previous=previous)
        return Reloaded(previous, dropped_block_count)
