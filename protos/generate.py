"""Writes everything that is made out of the .proto files: run it with ``make proto``.

* ``protos/gen/prefixd/v1/``: Python messages, gRPC stubs and their type stubs (``prefixd.v1``);
* ``protos/gen/prefixd.protoset``: descriptors with comments, for ``grpcurl -protoset``;
* ``.typing/prefixd/``: links that show mypy the import names, which it cannot derive from
  setuptools' ``package-dir``.

None of it is committed. Generated code refuses a protobuf runtime older than its compiler, so it is
made on the machine that runs it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS_FOLDER = Path(__file__).resolve().parent
REPOSITORY_FOLDER = PROTOS_FOLDER.parent
GENERATED_FOLDER = PROTOS_FOLDER / "gen"
PACKAGE = Path("prefixd") / "v1"
LINKS_FOLDER = REPOSITORY_FOLDER / ".typing" / "prefixd"
LINKED_FOLDERS = {
    "clients": Path("clients"),
    "controller": Path("controller"),
    "kernels": Path("kernels"),
    "v1": Path("protos") / "gen" / PACKAGE,
    "worker": Path("worker"),
}


def main() -> None:
    """Generate into a fresh folder, then put it in the place of the old one."""
    with tempfile.TemporaryDirectory(dir=PROTOS_FOLDER, prefix=".gen-") as folder:
        fresh_folder = Path(folder) / "gen"
        fresh_folder.mkdir()
        generate(fresh_folder)
        shutil.rmtree(GENERATED_FOLDER, ignore_errors=True)
        fresh_folder.rename(GENERATED_FOLDER)
    link()


def generate(target_folder: Path) -> None:
    """Run protoc over all files of the package; ends the process with one line if it fails."""
    proto_paths = sorted(str(path) for path in (PROTOS_FOLDER / PACKAGE).glob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS_FOLDER}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--python_out={target_folder}",
        f"--grpc_python_out={target_folder}",
        f"--mypy_out=quiet:{target_folder}",
        f"--mypy_grpc_out=quiet:{target_folder}",
        f"--plugin=protoc-gen-mypy={_plugin_path('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin_path('protoc-gen-mypy_grpc')}",
        f"--descriptor_set_out={target_folder / 'prefixd.protoset'}",
        "--include_imports",
        "--include_source_info",
        *proto_paths,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("prefixd: protoc refused the .proto files (see above)")
    package_folder = target_folder / PACKAGE
    (package_folder / "__init__.py").write_text('"""Generated from protos/prefixd/v1."""\n')
    (package_folder / "py.typed").touch()


def link() -> None:
    """Lay the link farm that mypy reads as the namespace package ``prefixd``."""
    LINKS_FOLDER.mkdir(parents=True, exist_ok=True)
    for name, folder in LINKED_FOLDERS.items():
        path = LINKS_FOLDER / name
        path.unlink(missing_ok=True)
        path.symlink_to(Path("..") / ".." / folder, target_is_directory=True)


def _plugin_path(name: str) -> Path:
    path = Path(sys.executable).parent / name
    if not path.exists():
        sys.exit(f"prefixd: {name} is missing beside {sys.executable}; install mypy-protobuf")
    return path


if __name__ == "__main__":
    main()
