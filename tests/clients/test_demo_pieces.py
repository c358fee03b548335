"""The demo's pieces that need no model: its verdict, its arithmetic, its grpcurl command."""

import io
import json
import shlex

import pytest
from rich.console import Console

from prefixd.clients.answers import Answer, FinishReason
from prefixd.clients.demo import grpcurl, report
from prefixd.clients.demo.scenario import Asked
from tests.support.expected_cache import cached_token_count_expected


def asked(prompt: range | list[int], generated: tuple[int, ...] = ()) -> Asked:
    """A question with these tokens in its prompt and its answer."""
    answer = Answer(
        sequence_id="sequence",
        text="text",
        token_ids=generated,
        finish_reason=FinishReason.END_OF_SEQUENCE,
        stop_string="",
        prompt_token_count=len(prompt),
        cached_token_count=0,
        generated_token_count=len(generated),
        block_count=1,
        time_to_first_token_ms=1.0,
        decode_tokens_per_second=1.0,
        preemption_count=0,
        draft_token_count=0,
        accepted_draft_token_count=0,
        sample_index=0,
        score=None,
        prompt_logprobs=None,
    )
    return Asked("question", tuple(prompt), answer)


@pytest.mark.parametrize(
    ("identical", "must_be_identical", "is_right"),
    [(True, True, True), (True, False, True), (False, True, False), (False, False, True)],
)
def test_only_a_bitwise_backend_must_answer_the_same(
    identical: bool, must_be_identical: bool, is_right: bool
) -> None:
    """Where rounding may show, a difference is told and is no failure."""
    console = Console(file=io.StringIO())
    verdict = report.verdict(console, identical=identical, must_be_identical=must_be_identical)
    assert verdict is is_right


def test_expected_cache_is_whole_blocks_of_the_longest_common_prefix() -> None:
    """Rounded down to blocks, over all earlier questions and their answers (S6)."""
    one = asked([*range(50), 99])
    assert cached_token_count_expected(one, [], block_size=16) == 0
    assert cached_token_count_expected(one, [asked(range(40))], block_size=16) == 32
    earlier = [asked(range(20)), asked(range(45), generated=(45, 46, 47, 48))]
    assert cached_token_count_expected(one, earlier, block_size=16) == 48


def test_expected_cache_leaves_the_last_token_to_compute() -> None:
    """An equal prompt is never cached as a whole (S7)."""
    assert cached_token_count_expected(asked(range(32)), [asked(range(32))], block_size=16) == 16


def test_grpcurl_command_survives_a_shell() -> None:
    """What is printed can be pasted: the body arrives as one JSON argument."""
    command = grpcurl.sequence_command(
        address="127.0.0.1:7600", pool_name="it's a pool", sequence_id='"quoted" $HOME'
    )
    words = shlex.split(command.shown)
    assert words == ["grpcurl", *command.arguments]
    assert json.loads(words[3]) == {"pool_name": "it's a pool", "sequence_id": '"quoted" $HOME'}
