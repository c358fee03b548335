"""Errors of the model side."""

from pathlib import Path


class ModelRefused(Exception):
    """The guard found that paged attention would not compute this model correctly."""

    def __init__(self, *, model_name: str, reason: str) -> None:
        super().__init__(f"model {model_name!r} is refused: {reason}")
        self.model_name = model_name
        self.reason = reason


class ModelUnavailable(Exception):
    """The model's files could not be found, fetched or read."""

    def __init__(self, *, model_name: str, reason: str) -> None:
        super().__init__(f"model {model_name!r} is unavailable: {reason}")
        self.model_name = model_name
        self.reason = reason


class WeightsUnusable(Exception):
    """A folder holds no weights that can be read and fit the running model."""

    def __init__(self, *, folder: Path, reason: str) -> None:
        super().__init__(f"the weights in {folder} cannot be used: {reason}")
        self.folder = folder
        self.reason = reason


class AdapterUnusable(Exception):
    """A LoRA adapter cannot be read, or does not fit the model."""

    def __init__(self, *, name: str, reason: str) -> None:
        super().__init__(f"the adapter {name!r} cannot be used: {reason}")
        self.name = name
        self.reason = reason
