"""The attention backends by name. Importing this imports neither torch nor any of them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixd.worker.attention.seam import AttentionBackend

# Strings, so that a backend's own imports happen only where it is chosen.
BACKENDS = {
    "reference": "prefixd.worker.attention.reference:ReferenceBackend",
    "strict": "prefixd.worker.attention.strict:StrictBackend",
    "torch": "prefixd.worker.attention.sdpa:SdpaBackend",
    "triton": "prefixd.worker.attention.triton:TritonBackend",
}

AUTO = "auto"
"""Stands for the fastest backend of the device."""

_FASTEST_BY_DEVICE_TYPE = {"cpu": "torch", "cuda": "triton"}


class UnknownBackend(ValueError):
    """No attention backend has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"attention backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
        self.name = name


class BackendUnavailable(RuntimeError):
    """An attention backend cannot run on this machine."""

    def __init__(self, *, name: str, reason: str) -> None:
        super().__init__(f"attention backend {name!r} cannot run here: {reason}")
        self.name = name
        self.reason = reason


def backend_name_for(name: str, *, device_type: str) -> str:
    """The backend that a name stands for on "cpu" or "cuda": itself, but for AUTO."""
    return _FASTEST_BY_DEVICE_TYPE[device_type] if name == AUTO else name


def create_backend(name: str) -> "AttentionBackend":
    """Imports and makes a backend.

    Raises:
        UnknownBackend: names the known ones; AUTO must have been resolved.
        BackendUnavailable: it needs what this machine lacks.
    """
    if name not in BACKENDS:
        raise UnknownBackend(name)
    module_name, class_name = BACKENDS[name].split(":")
    backend: AttentionBackend = getattr(import_module(module_name), class_name)()
    return backend
