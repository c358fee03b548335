"""docs/command-line.md names every key that --json prints, and every exit code."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from prefixd.clients import answers, events, results
from prefixd.clients.cli import main

PAGE = Path("docs/command-line.md")
PRINTED: tuple[Any, ...] = (
    answers.Answer,
    answers.Reloaded,
    answers.WorkerInfo,
    events.BlockKey,
    events.Cleared,
    events.Removed,
    events.Stored,
    results.AgeHistogram,
    results.Block,
    results.BlockHolders,
    results.BlockTable,
    results.Evicted,
    results.Flushed,
    results.FreeOrder,
    results.Identity,
    results.KvGroup,
    results.LoraAdapter,
    results.MultimodalItem,
    results.Pool,
    results.PoolStatistics,
    results.Sequence,
    results.SequenceTables,
    results.ServerInfo,
    results.Verified,
)


@pytest.fixture(scope="module")
def words(repository_folder: Path) -> set[str]:
    """All code words of the page."""
    text = (repository_folder / PAGE).read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("kind", PRINTED, ids=lambda kind: kind.__name__)
def test_every_key_is_documented(words: set[str], kind: Any) -> None:
    """A key that programs can see stands on the page."""
    assert {field.name for field in dataclasses.fields(kind)} <= words


def test_every_enum_value_is_documented(words: set[str]) -> None:
    """So does every value of a key that has few of them."""
    for names in (
        answers.FinishReason,
        results.BlockContent,
        results.BlockState,
        results.KvGroupKind,
    ):
        assert {name.value for name in names} <= words
    assert set(events.KINDS.values()) <= words


def test_every_exit_code_is_documented(repository_folder: Path) -> None:
    """The table of exit codes has a row for each."""
    text = (repository_folder / PAGE).read_text(encoding="utf-8")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    named = {value for name, value in vars(main).items() if name.startswith("EXIT_")}
    assert {0, *named} == codes
