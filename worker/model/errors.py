"""Errors of the model side."""


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
