"""The demo, run once with the real model; what it printed and what it measured."""

import io
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from rich.console import Console

from prefixd.clients.demo import grpcurl, scenario
from prefixd.clients.demo.__main__ import LIVE_SEQUENCE_ID, Outcome, run, servers_config
from tests.clients.test_up import lives
from tests.support.expected_cache import cached_token_count_expected

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

COLD_TO_WARM_RATIO_MIN = 15.0


@dataclass(frozen=True)
class Shown:
    """A demo's outcome and its text."""

    outcome: Outcome
    text: str


@pytest.fixture(scope="module")
def demo() -> Shown:
    """The whole demo on the CPU."""
    console = Console(file=io.StringIO(), width=140, highlight=False)
    outcome = run(console, servers_config(None, device="cpu"))
    assert isinstance(console.file, io.StringIO)
    return Shown(outcome, console.file.getvalue())


def test_answers_are_identical_with_and_without_the_cache(demo: Shown) -> None:
    """On the strict backend no greedy answer depends on what was cached."""
    assert demo.outcome.is_right
    assert demo.text.count("answer identical") == len(scenario.QUESTIONS)


def test_cached_tokens_are_the_whole_blocks_of_the_common_prefix(demo: Shown) -> None:
    """floor(common token prefix / block size) * block size, for each question (S6, S7)."""
    asked = demo.outcome.asked
    for index, one in enumerate(asked):
        expected = cached_token_count_expected(
            one, asked[:index], block_size=demo.outcome.block_size
        )
        assert one.answer.cached_token_count == expected
    assert asked[0].answer.cached_token_count == 0
    assert asked[1].answer.cached_token_count > 1_500


def test_warm_time_to_first_token_is_a_fifteenth_of_cold(demo: Shown) -> None:
    """After a warm-up forward, in one run; the best warm time, since noise only adds."""
    cold, *warm = (one.answer.time_to_first_token_ms for one in demo.outcome.asked)
    assert cold / min(warm) >= COLD_TO_WARM_RATIO_MIN


def test_the_document_is_of_the_promised_length(demo: Shown) -> None:
    """Between 1,500 and 2,500 tokens."""
    for one in demo.outcome.asked:
        assert 1_500 <= one.answer.prompt_token_count <= 2_500


def test_questions_share_their_beginning_only(demo: Shown) -> None:
    """The prompts differ behind the manual."""
    prompts = [one.prompt_token_ids for one in demo.outcome.asked]
    assert all(first != second for first, second in pairwise(prompts))


def test_answers_are_in_the_manual(demo: Shown) -> None:
    """The model read it: each answer holds the fact that was asked for."""
    facts = ("F sharp", "KX-14", "555-0142")
    for one, fact in zip(demo.outcome.asked, facts, strict=True):
        assert fact in scenario.manual()
        assert fact in one.answer.text


def test_the_grpcurl_command_is_shown_and_was_run(demo: Shown) -> None:
    """A live sequence's block table is fetched with the command that is printed."""
    assert f'"sequence_id": "{LIVE_SEQUENCE_ID}"' in demo.text
    assert "prefixd.v1.InspectService/GetSequence" in demo.text
    if grpcurl.find_grpcurl() is None:
        pytest.skip("grpcurl is not installed beside this Python")
    assert "The real grpcurl has just run this command" in demo.text


def test_both_processes_have_been_stopped(demo: Shown) -> None:
    """No process is left behind."""
    pids = [int(pid) for pid in re.findall(r"\(process (\d+)\)", demo.text)]
    assert len(pids) == 2
    assert not any(lives(pid) for pid in pids)
