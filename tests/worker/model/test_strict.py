"""On the strict backend cached output is exactly uncached output: `torch.equal`, no tolerance.

Shown on the small real model, and on a Gemma 3 of four KV groups of which three have a window
shorter than most chunks and any prompt.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from prefixd.kernels.layer_kv import FP8_DTYPE
from tests.support.models import (
    CONFIGS,
    GroupedHarness,
    PagedHarness,
    in_one_group,
    mixed_config,
    random_model,
    random_tokens,
)

TABLE = (9, 4, 5, 6, 30, 31, 2, 50, 51, 52)
OTHER_TABLE = (9, 4, 5, 6, 20, 21, 22, 23, 24, 25)
TOKEN_COUNT = 150  # three key tiles, the last one in part
SHARED_TOKEN_COUNT = 64
KV_DTYPES = (torch.float32, torch.int8, FP8_DTYPE)
"""A stored token is a function of that token alone in 8 bits, too."""


SUBJECTS = [
    pytest.param(
        (model, kv_dtype),
        id=f"{model}-{kv_dtype}",
        marks=[pytest.mark.model] * (model == "smollm2")
        + [pytest.mark.slow] * (model == "smollm2" and kv_dtype != torch.float32),
    )
    for model in ("smollm2", "gemma3")
    for kv_dtype in KV_DTYPES
]


@pytest.fixture(scope="module", params=SUBJECTS)
def harness(request: pytest.FixtureRequest) -> GroupedHarness:
    """One pool for all tests: what an earlier test left in it must not matter."""
    name, kv_dtype = request.param
    if name == "smollm2":
        model = request.getfixturevalue("smollm2")
    else:
        model = random_model(mixed_config())
        assert [None, 20, 20, 20] == [group.window_token_count for group in model.groups]
    return GroupedHarness(model, backend="strict", kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def token_ids(harness: GroupedHarness) -> list[int]:
    """The prompt of every test."""
    return random_tokens(TOKEN_COUNT, below=harness.model.vocabulary_size, seed=1)


@pytest.fixture(scope="module")
def cold(harness: GroupedHarness, token_ids: list[int]) -> Tensor:
    """Logits of every position by one cold pass, alone."""
    return harness.whole(token_ids, TABLE).clone()


def test_prefix_hit_equals_cold(
    harness: GroupedHarness, token_ids: list[int], cold: Tensor
) -> None:
    """Blocks that another prompt wrote, in a pass of another length."""
    other = token_ids[:SHARED_TOKEN_COUNT] + [7] * 9
    harness.whole(other, OTHER_TABLE)
    table = (*OTHER_TABLE[:4], *TABLE[4:])
    chunk = harness.chunk(token_ids, table, SHARED_TOKEN_COUNT, TOKEN_COUNT)
    assert torch.equal(harness.run(chunk)[0], cold[SHARED_TOKEN_COUNT:])


@pytest.mark.parametrize("cuts", [(1,), (63, 64, 65), (50, 117)])
def test_chunked_equals_one_shot(
    harness: GroupedHarness, token_ids: list[int], cold: Tensor, cuts: tuple[int, ...]
) -> None:
    """Chunks of one token and more, cut at, before and behind tile borders."""
    borders = [0, *cuts, TOKEN_COUNT]
    parts = [
        harness.run(harness.chunk(token_ids, TABLE, start, end))[0]
        for start, end in pairwise(borders)
    ]
    assert torch.equal(torch.cat(parts), cold)


def test_batched_equals_alone(harness: GroupedHarness, token_ids: list[int], cold: Tensor) -> None:
    """Between two other sequences, at an odd row offset and in other blocks."""
    before, behind = token_ids[10:15], token_ids[40:71]
    table = tuple(range(32, 42))
    _, alone, _ = harness.run(
        harness.chunk(before, (1,), 0, len(before)),
        harness.chunk(token_ids, table, 0, TOKEN_COUNT),
        harness.chunk(behind, (60, 11), 0, len(behind)),
    )
    assert torch.equal(alone, cold)


def test_decode_equals_prefill(harness: GroupedHarness, token_ids: list[int], cold: Tensor) -> None:
    """Token by token, first alone and then beside another sequence, across a tile border."""
    start = 126
    harness.run(harness.chunk(token_ids, TABLE, 0, start))
    other = token_ids[:40]
    harness.run(harness.chunk(other, (60, 61, 62), 0, 30))
    rows = []
    for position in range(start, start + 4):
        step = harness.chunk(token_ids, TABLE, position, position + 1)
        if position < start + 2:
            rows += harness.run(step)
        else:
            beside = position - start + 28
            neighbour = harness.chunk(other, (60, 61, 62), beside, beside + 1)
            rows.append(harness.run(neighbour, step)[1])
    assert torch.equal(torch.cat(rows), cold[start : start + 4])


def test_s10_writer_and_reader_of_one_token_in_one_pass_equal_cold(
    harness: GroupedHarness, token_ids: list[int], cold: Tensor
) -> None:
    """S10: a joiner with a one-token rest reads blocks that its own pass writes."""
    joined = TOKEN_COUNT - TOKEN_COUNT % 16
    joiner_table = (*TABLE[: joined // 16], 60)
    reader, writer = harness.run(
        harness.chunk(token_ids[: joined + 1], joiner_table, joined, joined + 1),
        harness.chunk(token_ids, TABLE, 0, TOKEN_COUNT),
    )
    assert torch.equal(writer, cold)
    assert torch.equal(reader[0], cold[joined])


def test_s16_copied_partial_block_equals_cold(
    harness: GroupedHarness, token_ids: list[int], cold: Tensor
) -> None:
    """S16: a fork goes on in a private copy of the tokens it shares of a partial block."""
    forked = 70
    harness.run(harness.chunk(token_ids, TABLE, 0, 77))
    child_table = (*TABLE[:4], 60, 61, 62, 63, 12, 13)
    rest = harness.chunk(token_ids, child_table, forked, TOKEN_COUNT)
    (logits,) = harness.run(rest, copies=harness.copies(TABLE[4], 60, forked - 64))
    assert torch.equal(logits, cold[forked:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_every_dense_family_is_reproducible(family: str, kv_dtype: torch.dtype) -> None:
    """Windows, soft caps, head widths, biases: chunked in company equals alone."""
    model = in_one_group(random_model(CONFIGS[family]()))
    harness = PagedHarness(model, backend="strict", kv_dtype=kv_dtype)
    token_ids = random_tokens(100, below=model.vocabulary_size, seed=3)
    cold = harness.whole(token_ids, range(1, 8)).clone()
    table = (20, 50, 21, 49, 22, 48, 23)
    parts = []
    for start, end in ((0, 37), (37, 38), (38, 99), (99, 100)):
        company = harness.chunk(token_ids[5:], (30, 31), 0, 3)
        parts.append(harness.run(company, harness.chunk(token_ids, table, start, end))[1])
    assert torch.equal(torch.cat(parts), cold)
