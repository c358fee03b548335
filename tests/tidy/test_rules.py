"""Each tidy rule fails on a bad sample and passes a good one."""

from __future__ import annotations

import pytest

from tests.tidy import rules

TOO_LONG_FUNCTION = "def read():\n" + "    pass\n" * rules.FUNCTION_LINE_COUNT_MAX


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("controller/server.py", "import torch"),
        ("controller/server.py", "from torch.nn import functional"),
        ("controller/server.py", "def load():\n    import prefixd.worker.engine"),
        ("controller/server.py", "importlib.import_module('triton')"),
        ("controller/core/pool.py", "import time"),
        ("controller/core/pool.py", "from google.protobuf import message"),
        ("controller/core/pool.py", "from prefixd.v1 import cache_pb2"),
        ("controller/core/pool.py", "from prefixd.controller.rpc import convert"),
        ("worker/engine.py", "import hashlib"),
        ("worker/engine.py", "from prefixd.controller.core import errors"),
        ("worker/engine.py", "from prefixd import controller"),
        ("worker/attention/torch_backend.py", "from prefixd.v1 import cache_pb2"),
        ("worker/model/runner.py", "import grpc"),
        ("kernels/store.py", "import prefixd.worker.engine"),
        ("clients/cli/main.py", "import torch"),
        ("clients/cli/main.py", "from prefixd.controller import addresses"),
    ],
)
def test_an_import_across_the_architecture_is_found(path: str, source: str) -> None:
    """Whatever the form of the import and wherever it stands."""
    assert len(rules.check_imports(path, source)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("controller/server.py", "import asyncio\nimport prefixd.controller.core.pool"),
        ("controller/core/pool.py", "from prefixd.controller.core import errors"),
        ("controller/core/pool.py", "import hashlib, numpy"),
        ("worker/engine.py", "import torch\nfrom prefixd.v1 import cache_pb2"),
        ("kernels/store.py", "import triton\nfrom prefixd.kernels import reference"),
        ("clients/cli/main.py", "import torchlight"),
        ("controllers/server.py", "import torch"),
    ],
)
def test_an_import_within_the_architecture_passes(path: str, source: str) -> None:
    """Names that merely begin like a banned one are not banned."""
    assert [] == rules.check_imports(path, source)


def test_a_relative_import_is_found() -> None:
    """Only absolute imports say where a name lives."""
    findings = rules.check_relative_imports("a.py", "from os import path\nfrom . import b")
    assert [2] == [finding.line for finding in findings]


def test_a_long_function_is_found() -> None:
    """One line above the limit is too many, the limit itself passes."""
    assert 1 == len(rules.check_sizes("a.py", TOO_LONG_FUNCTION))
    assert [] == rules.check_sizes("a.py", TOO_LONG_FUNCTION.removesuffix("    pass\n"))


def test_a_kernel_may_be_longer_but_not_endless() -> None:
    """Triton kernels have a limit of their own."""
    body = "    pass\n" * rules.KERNEL_LINE_COUNT_MAX
    kernel = "@triton.jit\ndef read():\n" + body
    assert 1 == len(rules.check_sizes("a.py", kernel))
    assert [] == rules.check_sizes("a.py", kernel.removesuffix("    pass\n"))


def test_a_long_file_is_found() -> None:
    """One line above the limit is too many, the limit itself passes."""
    assert [] == rules.check_sizes("a.py", "x = 1\n" * rules.FILE_LINE_COUNT_MAX)
    assert 1 == len(rules.check_sizes("a.py", "x = 1\n" * (rules.FILE_LINE_COUNT_MAX + 1)))


def test_a_vague_name_is_found() -> None:
    """Folders and modules alike."""
    paths = ["worker/utils/text.py", "worker/common.py", "worker/commons/a.py", "docs/common/a.md"]
    findings = rules.check_folder_names(paths)
    assert ["worker/utils/text.py", "worker/common.py"] == [finding.path for finding in findings]


def test_an_undeclared_dependency_is_found() -> None:
    """An import is allowed if any declared distribution provides it."""
    found = rules.check_dependencies(
        "a.py",
        "import os\nimport yaml.nodes\nimport grpc_status\nimport prefixd.v1",
        declared=frozenset({"grpcio-status"}),
        distributions={"yaml": ["PyYAML"], "grpc_status": ["grpcio_status"]},
        standard=frozenset({"os"}),
    )
    assert [2] == [finding.line for finding in found]


@pytest.mark.parametrize("folder", ["work", "root", "home/ann"])
def test_a_machine_path_is_found(folder: str) -> None:
    """A path in a string is found, a folder of the same name below another is not."""
    assert 1 == len(rules.check_machine_paths("a.md", f"\nsee `/{folder}/main`"))
    assert [] == rules.check_machine_paths("a.md", f"net/{folder}/main and {folder}/main")


def test_a_dead_link_is_found() -> None:
    """Files beside the document, folders and headings; addresses elsewhere are not looked at."""
    paths = frozenset({"docs/a.md", "docs/b.md", "bench/run.py"})
    alive = "# 2. Some `words`\n[b](b.md) [x](../bench) [w](#2-some-words) [w](https://a.b/c)"
    assert [] == rules.check_links("docs/a.md", alive, paths)
    dead = "[c](c.md)\n[b](../b.md)\n[w](#words)"
    assert [1, 2, 3] == [item.line for item in rules.check_links("docs/a.md", dead, paths)]


def test_an_undocumented_target_is_found() -> None:
    """Every phony target carries the line that `make help` prints."""
    text = ".PHONY: demo test\ndemo: ## Run the demo\n\t@true\ntest:\n\t@true\n"
    assert ["target test has no description"] == [
        finding.message for finding in rules.check_makefile(text)
    ]


def test_a_check_at_parse_time_is_found() -> None:
    """Such a check would break even `make help`; in a recipe it runs when it is needed."""
    text = "NPM := $(shell which npm)\nhelp:\n\t@echo $(shell date)\n"
    assert [1] == [finding.line for finding in rules.check_makefile(text)]


def test_a_word_counts_only_as_a_whole() -> None:
    """`Step` is not named by a text that says `StepRequest`."""
    texts = ["stub.StepRequest()", "stub.GetPool()"]
    assert ["Step"] == rules.missing_words(["Step", "GetPool"], texts)


def test_a_rule_is_stated_by_the_name_or_the_docstring_of_a_test() -> None:
    """Comments and helpers state nothing."""
    source = (
        "def test_s01_and_s12_hold():\n    pass\n"
        "def test_other():\n    'Shows S7, too.'\n    # S8\n"
        "def helper_s9():\n    'S10'\n"
    )
    assert "S1 S7 S12" == rules.stated_by_tests(source)


def test_requirement_names_are_normalized() -> None:
    """Extras, versions and markers are cut off."""
    requirements = ["torch>=2.11", "Grpc_IO ; x", "uvicorn[standard]==1", "ruff"]
    names = [rules.requirement_name(requirement) for requirement in requirements]
    assert ["torch", "grpc-io", "uvicorn", "ruff"] == names
