"""The attention backends by name."""

from importlib import import_module

from prefixd.worker.attention.seam import AttentionBackend

# Strings, so that a backend's own imports happen only where it is chosen.
BACKENDS = {
    "reference": "prefixd.worker.attention.reference:ReferenceBackend",
    "strict": "prefixd.worker.attention.strict:StrictBackend",
    "torch": "prefixd.worker.attention.sdpa:SdpaBackend",
    "triton": "prefixd.worker.attention.triton:TritonBackend",
}


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


def create_backend(name: str) -> AttentionBackend:
    """Imports and makes a backend.

    Raises:
        UnknownBackend: names the known ones.
        BackendUnavailable: it needs what this machine lacks.
    """
    if name not in BACKENDS:
        raise UnknownBackend(name)
    module_name, class_name = BACKENDS[name].split(":")
    backend: AttentionBackend = getattr(import_module(module_name), class_name)()
    return backend
