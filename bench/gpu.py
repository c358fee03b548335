"""Checks and measures the kernels and the worker's model side on a GPU: ``python bench/gpu.py``.

Takes under five minutes and no installation: it runs from a checkout with whatever torch (2.11 or
newer), triton (3.6) and transformers (5.17) the machine has. Prints a table and writes gpu.json.
The exit status is 1 where a result is wrong or a part failed; a missed target is no error.

``--device cpu --tiny`` runs all parts at toy sizes in triton's interpreter, to try the script
itself; its figures say nothing.
"""

import argparse
import faulthandler
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY_FOLDER = Path(__file__).resolve().parent.parent
LINKED_FOLDERS = {"bench": "bench", "prefixd/kernels": "kernels", "prefixd/worker": "worker"}
"""Import names by folder: all that this script needs of prefixd."""
PART_NAMES = ("correctness", "decode", "shared", "prefill", "steps", "first-tokens")
TIME_LIMIT_S = 298
"""A device that hangs does not keep its borrower waiting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(arguments)
    if options.device == "cpu":
        # Read by triton when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    try:
        with tempfile.TemporaryDirectory(prefix="prefixd-gpu-") as folder:
            link(Path(folder))
            _import_from(Path(folder))
            return _run(options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def link(folder: Path) -> None:
    """Lays links that show Python the import names, as an installation would."""
    for name, target in LINKED_FOLDERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(REPOSITORY_FOLDER / target, target_is_directory=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument(
        "--only", action="append", choices=PART_NAMES, default=[], help="one part (repeatable)"
    )
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY_FOLDER / "bench" / "out", help="folder for gpu.json"
    )
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU runs toy sizes only: add --tiny")
    return options


def _import_from(folder: Path) -> None:
    """Puts the links in the place of this script's folder, whose files would hide others."""
    own = Path(__file__).resolve().parent
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != own)]


def _run(options: argparse.Namespace) -> int:
    import torch

    from bench.gpu_parts.command import run
    from bench.gpu_parts.sizes import full_sizes, tiny_sizes

    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("no usable GPU; to try the script without one: --device cpu --tiny", file=sys.stderr)
        return 2
    else:
        device = torch.device("cuda", device.index or 0)
        # Triton launches on the present device, whatever its tensors say.
        torch.cuda.set_device(device)
    if options.tiny:
        print("toy sizes: only `right` counts, figures and targets say nothing")
    sizes = tiny_sizes() if options.tiny else full_sizes()
    return run(sizes, device, names=options.only, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
