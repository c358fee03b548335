"""The tree keeps the rules of CONTRIBUTING.md; the rules themselves are tests/tidy/rules.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from prefixd.v1 import errors_pb2
from tests.tidy import rules

PROTO_FILES = ("admin", "cache", "inspect", "pool", "worker")
SHIPPED_FOLDERS = ("clients", "controller", "kernels", "worker")
EXTRA_OF_PATH = {
    "clients/cli/relay.py": "events",
    "clients/relay": "events",
    "kernels": "worker",
    "worker": "worker",
}
BYTES_PER_FILE_MAX = 1_000_000

# Reasons that are part of the protocol while the feature that gives them is still to come.
REASONS_TO_COME = frozenset({"COPY_IN_SAME_STEP", "EVENTS_COMPACTED"})


@pytest.fixture(scope="module")
def paths(repository_folder: Path) -> list[str]:
    """All files of the tree that git tracks or would track."""
    if shutil.which("git") is None or not (repository_folder / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=repository_folder,
        check=True,
        capture_output=True,
        text=True,
    )
    names = listing.stdout.splitlines()
    return sorted(name for name in names if (repository_folder / name).is_file())


@pytest.fixture(scope="module")
def sources(repository_folder: Path, paths: list[str]) -> dict[str, str]:
    """The text of every Python file, by path."""
    return {path: (repository_folder / path).read_text() for path in paths if path.endswith(".py")}


@pytest.fixture(scope="module")
def project(repository_folder: Path) -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((repository_folder / "pyproject.toml").read_text())


def test_imports_follow_the_architecture(sources: dict[str, str]) -> None:
    """Each folder imports only what its place in the architecture allows."""
    assert_none(found(rules.check_imports, sources))


def test_imports_are_absolute(sources: dict[str, str]) -> None:
    """A name is imported from where it lives."""
    assert_none(found(rules.check_relative_imports, sources))


def test_files_and_functions_are_short(sources: dict[str, str]) -> None:
    """Files of at most 400 lines, functions of at most 70."""
    assert_none(found(rules.check_sizes, sources))


def test_no_folder_is_a_drawer(paths: list[str]) -> None:
    """There is no `utils` and no `common`."""
    assert_none(rules.check_folder_names(paths))


def test_no_file_names_the_machine_it_was_written_on(
    repository_folder: Path, paths: list[str]
) -> None:
    """No path and no registry of one machine stands in the tree."""
    texts = {path: _text(repository_folder / path) for path in paths}
    assert_none(found(rules.check_machine_paths, texts))


def test_links_lead_somewhere(repository_folder: Path, paths: list[str]) -> None:
    """Documents link to files and headings that exist."""
    texts = {path: _text(repository_folder / path) for path in paths if path.endswith(".md")}
    known = frozenset(paths)
    assert_none(found(lambda path, text: rules.check_links(path, text, known), texts))


def test_no_file_is_large(repository_folder: Path, paths: list[str]) -> None:
    """Weights and recordings belong elsewhere."""
    sizes = {path: (repository_folder / path).stat().st_size for path in paths}
    assert [] == [path for path, size in sizes.items() if size > BYTES_PER_FILE_MAX]


def test_packages_are_the_folders_of_the_tree(
    project: dict[str, Any], sources: dict[str, str]
) -> None:
    """A package missing from pyproject.toml would be absent from the wheel."""
    listed = project["tool"]["setuptools"]["packages"]
    folders = {
        str(PurePosixPath(path).parent)
        for path in sources
        if path.split("/")[0] in SHIPPED_FOLDERS and "/node/" not in path
    }
    names = {"prefixd." + folder.replace("/", ".") for folder in folders}
    assert sorted(names | {"prefixd.v1"}) == listed
    assert [] == [folder for folder in folders if f"{folder}/__init__.py" not in sources]


def test_the_wheel_holds_what_the_editable_install_shows(
    repository_folder: Path, tmp_path: Path, project: dict[str, Any], paths: list[str]
) -> None:
    """A wheel built from a copy of the tree has every file of every package that the tree has."""
    pytest.importorskip("setuptools", reason="setuptools builds the wheel")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository_folder / name, copy)
    for folder in (*SHIPPED_FOLDERS, "protos"):
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(repository_folder / folder, copy / folder, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*build, f"--wheel-dir={tmp_path}", str(copy)], check=False, capture_output=True, text=True
    )
    assert 0 == built.returncode, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = {name.replace(".", "/") for name in project["tool"]["setuptools"]["packages"]}
    generated = repository_folder / "protos" / "gen" / "prefixd" / "v1"
    expected = {f"prefixd/v1/{path.name}" for path in generated.iterdir() if path.is_file()}
    expected |= {
        f"prefixd/{path}" for path in paths if f"prefixd/{PurePosixPath(path).parent}" in packages
    }
    assert expected == shipped


def test_imported_distributions_are_declared(
    project: dict[str, Any], sources: dict[str, str]
) -> None:
    """Controller and clients need the base install alone; what needs more has its extra."""
    base = _names(project["project"]["dependencies"])
    extras = {
        extra: _names(requirements)
        for extra, requirements in project["project"]["optional-dependencies"].items()
    }
    distributions = dict(metadata.packages_distributions())
    findings: list[rules.Finding] = []
    for path, source in sources.items():
        declared = base
        if path.split("/")[0] not in SHIPPED_FOLDERS:
            declared |= frozenset().union(*extras.values())
        for prefix, extra in EXTRA_OF_PATH.items():
            if PurePosixPath(path).is_relative_to(prefix):
                declared |= extras[extra]
        findings += rules.check_dependencies(
            path,
            source,
            declared=declared,
            distributions=distributions,
            standard=sys.stdlib_module_names,
        )
    assert_none(findings)


def test_every_requirement_is_pinned(repository_folder: Path, project: dict[str, Any]) -> None:
    """constraints.txt pins each direct dependency to one version."""
    lines = (repository_folder / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [] == [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", pin)]
    wanted = _names(project["project"]["dependencies"])
    for requirements in project["project"]["optional-dependencies"].values():
        wanted |= _names(requirements)
    assert set() == wanted - {pin.partition("==")[0] for pin in pins}


def test_make_targets_are_described(repository_folder: Path) -> None:
    """`make help` tells about every target, and nothing runs while make reads the file."""
    text = (repository_folder / "Makefile").read_text()
    assert_none(rules.check_makefile(text))
    help_text = subprocess.run(
        ["make", "help"], cwd=repository_folder, check=True, capture_output=True, text=True
    ).stdout
    targets = ["proto", "demo", "test", "test-all", "lint", "bench", "clean", "help"]
    assert [] == [target for target in targets if f"make {target} " not in help_text]


def test_every_rpc_is_named_in_a_test(sources: dict[str, str]) -> None:
    """An RPC that no test calls might as well not work."""
    methods = [
        method.name
        for name in PROTO_FILES
        for service in import_module(f"prefixd.v1.{name}_pb2").DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert methods
    assert [] == rules.missing_words(methods, _test_texts(sources))


def test_every_error_reason_is_named_in_a_test(sources: dict[str, str]) -> None:
    """Every reason that the present features can give is asserted somewhere."""
    reasons = {
        name.removeprefix("ERROR_REASON_")
        for name in errors_pb2.ErrorReason.keys()  # noqa: SIM118
    }
    assert reasons >= REASONS_TO_COME
    expected = sorted(reasons - REASONS_TO_COME - {"UNSPECIFIED"})
    texts = [text.replace("ERROR_REASON_", " ") for text in _test_texts(sources)]
    assert [] == rules.missing_words(expected, texts)


def test_every_present_rule_is_shown_by_the_tests_it_names(
    repository_folder: Path, sources: dict[str, str]
) -> None:
    """A rule that DESIGN.md marks `now` names test files, and each of them states the rule."""
    table = (repository_folder / "DESIGN.md").read_text()
    rows = re.findall(r"^\| (S\d+) \|.*\| now \|(.*)\|$", table, flags=re.MULTILINE)
    assert rows
    findings = []
    for rule, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", cell)
        if not named:
            findings.append(rules.Finding("DESIGN.md", 1, f"{rule} names no test"))
        for path in named:
            if rule not in rules.stated_by_tests(sources.get(path, "")).split():
                findings.append(rules.Finding(path, 1, f"states no {rule}"))
    assert_none(findings)


def found(check: Any, texts: dict[str, str]) -> list[rules.Finding]:
    """Return what one check finds in all files."""
    return [finding for path, text in texts.items() for finding in check(path, text)]


def assert_none(findings: Iterable[rules.Finding]) -> None:
    """Fail with one line per finding."""
    lines = [str(finding) for finding in findings]
    assert not lines, "\n".join(lines)


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode()


def _names(requirements: Iterable[str]) -> frozenset[str]:
    return frozenset(rules.requirement_name(requirement) for requirement in requirements)


def _test_texts(sources: dict[str, str]) -> Iterator[str]:
    """Yield the text of every test but the tidy ones, which name things without trying them."""
    for path, text in sources.items():
        if path.startswith("tests/") and "tidy" not in path:
            yield text
