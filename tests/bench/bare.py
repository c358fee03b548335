"""Runs a script as on a machine that has torch, triton and transformers, and nothing of ours.

    python tests/bench/bare.py SCRIPT [ARGUMENT ...]

Packages are not there for whoever imports them, nor for whoever asks whether they are.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

HIDDEN = frozenset(
    {"cbor2", "gguf", "google", "grpc", "peft", "rich", "structlog", "typer", "xxhash"}
    | {"prefixd.clients", "prefixd.controller", "prefixd.v1"}
)


class Hiding:
    """A finder of modules that does not find some of them."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *arguments: Any) -> Any:
        """What the finder behind it finds."""
        parts = name.split(".")
        if HIDDEN & {parts[0], ".".join(parts[:2])}:
            return None
        return self._finder.find_spec(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main() -> None:
    """Runs the script in this process."""
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
