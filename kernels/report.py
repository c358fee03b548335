"""Reports what every kernel takes on every GPU, without a GPU: ``make kernels-report``.

Compiles each variant for each target and prints registers, shared memory and spills. Fails where
one spills, asks for more shared memory than there is, or does not compile. Results are kept by a
hash of what they depend on, so only what changed is compiled again.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from triton.errors import TritonError

from prefixd.kernels.compilation import TARGETS, Compilation, Resources, Target
from prefixd.kernels.layer_kv import FP8_DTYPE
from prefixd.kernels.variants import LayerKind, Variant, default_kinds, small_kinds, variants_of

KINDS = {"default": default_kinds, "small": small_kinds}


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one variant on one target.

    Attributes:
        target, variant: names.
        resources: None where it was refused or failed.
        refusal: why the target cannot have this variant; such a line is no failure.
        failure: what is wrong, empty where nothing is.
    """

    target: str
    variant: str
    resources: Resources | None = None
    refusal: str = ""
    failure: str = ""

    def text(self) -> str:
        """One line of the table."""
        what = self.failure or (f"refused: {self.refusal}" if self.refusal else "")
        if self.resources is None:
            return f"{self.target:7} {self.variant:40} {what}"
        taken = self.resources
        return (
            f"{self.target:7} {self.variant:40} {taken.register_count:5} "
            f"{taken.shared_byte_count:8} {taken.spill_count:7}  {what}"
        ).rstrip()


class ResourceCache:
    """Resources by compilation key, one small file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def measured(self, compilation: Compilation) -> Resources:
        """What is known of a compilation, or else compiles."""
        path = self._folder / f"{compilation.key()}.json"
        if path.exists():
            return Resources(**json.loads(path.read_text()))
        resources = compilation.resources()
        # Two processes may find out the same at once; a file appears whole or not at all.
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(resources)))
        draft.replace(path)
        return resources


def report_target(target: Target, kinds: Iterable[LayerKind], folder: Path) -> list[Line]:
    """One line per variant on one target."""
    cache = ResourceCache(folder)
    variants = [variant for kind in kinds for variant in variants_of(kind)]
    return [_line_of(variant, target, cache) for variant in variants]


def _line_of(variant: Variant, target: Target, cache: ResourceCache) -> Line:
    line = Line(target.name, variant.name)
    if variant.kind.kv_dtype == FP8_DTYPE and target.fp8_refusal is not None:
        return replace(line, refusal=target.fp8_refusal)
    try:
        resources = cache.measured(Compilation(variant.launch, target))
    except (TritonError, RuntimeError) as error:
        return replace(line, failure=f"does not compile: {error}")
    failure = ""
    if resources.spill_count:
        failure = "spills"
    elif resources.shared_byte_count > target.shared_byte_count_max:
        failure = f"more than {target.shared_byte_count_max} bytes of shared memory"
    return replace(line, resources=resources, failure=failure)


def report(targets: Sequence[Target], kinds: Sequence[LayerKind], folder: Path) -> list[Line]:
    """All lines, targets side by side in processes of their own."""
    job_count = min(len(targets), os.cpu_count() or 1)
    # A fresh interpreter each: compilers keep threads, which do not survive a fork.
    with ProcessPoolExecutor(job_count, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(report_target, target, kinds, folder) for target in targets]
        return [line for job in jobs for line in job.result()]


def default_cache_folder() -> Path:
    """``$PREFIXD_CACHE/kernels``, or the like below the user's cache folder."""
    root = os.environ.get("PREFIXD_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "prefixd") / "kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m prefixd.kernels.report", description=__doc__)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="one GPU (may be repeated); default: all"
    )
    parser.add_argument("--kinds", choices=KINDS, default="default", help="which kinds of layers")
    parser.add_argument("--cache-folder", type=Path, default=default_cache_folder())
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(arguments)
    targets = [TARGETS[name] for name in options.target or TARGETS]
    lines = report(targets, KINDS[options.kinds](), options.cache_folder)
    print(f"{'target':7} {'kernel':40} {'regs':>5} {'shared':>8} {'spills':>7}")
    for line in lines:
        print(line.text())
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    failures = [line for line in lines if line.failure]
    refused = [line for line in lines if line.refusal]
    print(f"{len(lines)} variants, {len(refused)} refused, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
