"""The rules of the code base as functions from source text to findings.

Each takes what it checks as an argument, so that a test can show it failing on a bad sample.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

FILE_LINE_COUNT_MAX = 400
FUNCTION_LINE_COUNT_MAX = 70
# A kernel's many arguments stand one per line, and its loops share what lives in registers.
KERNEL_LINE_COUNT_MAX = 160
VAGUE_FOLDER_NAMES = frozenset({"common", "helpers", "misc", "util", "utils"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class ImportRule:
    """Modules that the files below one folder may not import, and why."""

    folder: str
    banned: frozenset[str]
    reason: str
    allowed: frozenset[str] = frozenset()
    """Exceptions from `banned`, by longer prefix."""


IMPORT_RULES = (
    ImportRule(
        "controller",
        frozenset(
            {"torch", "triton", "transformers", "prefixd.worker", "prefixd.kernels"}
            | {"prefixd.clients"}
        ),
        "the controller is never on the tensor path",
    ),
    ImportRule(
        "controller/core",
        frozenset(
            {
                "asyncio",
                "concurrent",
                "datetime",
                "google",
                "grpc",
                "io",
                "logging",
                "multiprocessing",
            }
            | {"os", "pathlib", "prefixd", "random", "secrets", "signal", "socket", "structlog"}
            | {"subprocess", "sys", "tempfile", "threading", "time", "uuid"}
        ),
        "the core is pure: time and chance come in as arguments",
        allowed=frozenset({"prefixd.controller.core"}),
    ),
    ImportRule(
        "worker",
        frozenset({"hashlib", "xxhash", "prefixd.controller", "prefixd.clients"}),
        "a worker neither hashes nor evicts",
    ),
    ImportRule(
        "worker/model",
        frozenset({"grpc", "google", "prefixd.v1", "prefixd.worker.rpc"}),
        "the model side takes plain data",
    ),
    ImportRule(
        "worker/attention",
        frozenset({"grpc", "google", "prefixd.v1", "prefixd.worker.rpc", "transformers"}),
        "attention knows tensors only",
    ),
    ImportRule(
        "kernels",
        frozenset({"grpc", "google", "transformers", "prefixd"}),
        "kernels know tensors only",
        allowed=frozenset({"prefixd.kernels"}),
    ),
    ImportRule(
        "clients",
        frozenset(
            {"torch", "triton", "transformers", "prefixd.controller", "prefixd.worker"}
            | {"prefixd.kernels"}
        ),
        "clients share the proto with the servers, and nothing else",
    ),
    ImportRule(
        "bench/gpu_parts",
        frozenset(
            {"cbor2", "google", "grpc", "rich", "structlog", "typer", "xxhash"}
            | {"prefixd.clients", "prefixd.controller", "prefixd.v1", "prefixd.worker.rpc"}
        ),
        "a machine with a GPU may have torch, triton and transformers only",
    ),
)


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the absolute name and the line of every import, `import_module` of a literal included.

    ``from a import b`` yields ``a.b``, since `b` may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
            and _called_name(node) in {"import_module", "__import__", "find_spec"}
        ):
            yield node.args[0].value, node.lineno


def check_imports(
    path: str, source: str, rules: Iterable[ImportRule] = IMPORT_RULES
) -> list[Finding]:
    """Find imports that the folder of `path` may not have."""
    imports = list(imported_modules(ast.parse(source)))
    return [
        Finding(path, line, f"imports {module}: {rule.reason}")
        for rule in rules
        if PurePosixPath(path).is_relative_to(rule.folder)
        for module, line in imports
        if _covers(rule.banned, module) and not _covers(rule.allowed, module)
    ]


def check_relative_imports(path: str, source: str) -> list[Finding]:
    """Find imports that begin with a dot."""
    return [
        Finding(path, node.lineno, "relative import")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def check_sizes(path: str, source: str) -> list[Finding]:
    """Find files and functions that are too long to read in one go."""
    findings = []
    line_count = len(source.splitlines())
    if line_count > FILE_LINE_COUNT_MAX:
        findings.append(Finding(path, line_count, f"{line_count} lines > {FILE_LINE_COUNT_MAX}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = KERNEL_LINE_COUNT_MAX if _is_kernel(node) else FUNCTION_LINE_COUNT_MAX
            if length > limit:
                message = f"{node.name} has {length} lines > {limit}"
                findings.append(Finding(path, node.lineno, message))
    return findings


def check_folder_names(paths: Iterable[str]) -> list[Finding]:
    """Find modules and folders whose name says nothing about what they hold."""
    return [
        Finding(path, 1, "name it after what it holds")
        for path in paths
        if path.endswith(".py")
        and VAGUE_FOLDER_NAMES.intersection(PurePosixPath(path).with_suffix("").parts)
    ]


def check_dependencies(
    path: str,
    source: str,
    *,
    declared: frozenset[str],
    distributions: Mapping[str, list[str]],
    standard: frozenset[str],
) -> list[Finding]:
    """Find imports of installed distributions that the project does not declare.

    `declared` holds normalized distribution names; `distributions` maps top-level import names to
    the distributions that provide them; `standard` names the standard library's modules.
    """
    findings = []
    for module, line in imported_modules(ast.parse(source)):
        top = module.partition(".")[0]
        if top in standard or top in {"prefixd", "tests", "bench"}:
            continue
        providers = {normalized(name) for name in distributions.get(top, [])}
        if not providers & declared:
            findings.append(Finding(path, line, f"imports {top}, which is not declared"))
    return findings


def check_machine_paths(path: str, text: str) -> list[Finding]:
    """Find traces of the machine that a file was written on."""
    return [
        Finding(path, index, f"names {match.group().strip()!r}")
        for index, line in enumerate(text.splitlines(), start=1)
        for match in [_MACHINE_TRACE.search(line)]
        if match
    ]


def check_makefile(text: str) -> list[Finding]:
    """Find phony targets without a description, and checks that run while make reads the file."""
    findings = [
        Finding("Makefile", index, "runs while make reads the file")
        for index, line in enumerate(text.splitlines(), start=1)
        if re.search(r"\$\((shell|error|warning) ", line) and not line.startswith("\t")
    ]
    described = set(re.findall(r"^([a-z-]+):.*## \S", text, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE)
    targets = phony.group(1).split() if phony else []
    findings += [
        Finding("Makefile", 1, f"target {target} has no description")
        for target in targets
        if target not in described
    ]
    return findings


def check_links(path: str, text: str, paths: frozenset[str]) -> list[Finding]:
    """Find links of a Markdown file to files that are not among `paths`, or to missing headings."""
    headings = {_anchor(line) for line in text.splitlines() if line.startswith("#")}
    findings = []
    for index, line in enumerate(text.splitlines(), start=1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            file, _, heading = target.partition("#")
            if ":" in file:
                continue
            name = posixpath.normpath((PurePosixPath(path).parent / file).as_posix())
            known = name in paths or any(other.startswith(f"{name}/") for other in paths)
            if (file and not known) or (not file and heading not in headings):
                findings.append(Finding(path, index, f"links to {target}, which does not exist"))
    return findings


def missing_words(words: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Return the `words` that stand in none of the `texts` as whole words, in order."""
    present: set[str] = set()
    for text in texts:
        present.update(re.findall(r"\w+", text))
    return [word for word in words if word not in present]


def stated_by_tests(source: str) -> str:
    """Return the rules that the tests of a file state, in words: S7 for `test_s7_...` or "S7"."""
    stated: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_":
            stated |= set(re.findall(r"_s0?(\d+)(?=_|$)", node.name))
            stated |= set(re.findall(r"\bS(\d+)\b", ast.get_docstring(node) or ""))
    return " ".join(f"S{number}" for number in sorted(stated, key=int))


def normalized(distribution: str) -> str:
    """Return a distribution's name in the form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def requirement_name(requirement: str) -> str:
    """Return the normalized distribution name of a requirement such as ``torch>=2.11; ...``."""
    return normalized(re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0])


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(item).startswith("triton.jit") for item in function.decorator_list)


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower())
    return re.sub(r"\s", "-", words)


def _covers(prefixes: frozenset[str], module: str) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


# Put together here so that this file does not find itself.
_MACHINE_TRACE = re.compile(
    r"(?<![\w.$}])/(?:"
    + "|".join(["work", "root", r"home/\w+", "tmp/bash_" + "jobs", "opt/wheels"])
    + r")(?:/|\b)|"
    + "|".join(["registry" + r"\.npmjs", "files" + r"\.pythonhosted"])
)
