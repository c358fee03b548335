"""Imports every module of the packages that are named: python import_all.py PACKAGE ..."""

from __future__ import annotations

import importlib
import pkgutil
import sys

# Converts GGUF files, so it wants the library that reads them.
LEFT_OUT = frozenset({"prefixd.worker.model.gguf_conversion"})

if __name__ == "__main__":
    for package in map(importlib.import_module, sys.argv[1:]):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name not in LEFT_OUT:
                print(importlib.import_module(module.name).__name__)
