"""What the runner refuses, and that a refused pass writes nothing; copies; several models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.worker.attention.batch import SequenceRows
from prefixd.worker.model.forward import BlockCopy, Chunk, ForwardPass, GroupRows, flatten
from tests.support.models import (
    PagedHarness,
    eager_logits,
    eager_twin,
    gpt2_config,
    llama_config,
    random_model,
    random_tokens,
)

TOKENS = random_tokens(40, below=160, seed=1)
TABLE = (5, 6, 9)


@pytest.fixture
def harness() -> PagedHarness:
    """A tiny model with a fresh pool of 64 blocks of 16."""
    return PagedHarness(random_model(llama_config()), backend="torch")


def _pass(harness: PagedHarness, **changes: Any) -> ForwardPass:
    return replace(flatten([harness.chunk(TOKENS, TABLE, 0, 40)]), **changes)


def _rows(forward: ForwardPass, **changes: Any) -> dict[str, tuple[GroupRows, ...]]:
    return {"groups": (replace(forward.groups[0], **changes),)}


def _slot(forward: ForwardPass, slot: int) -> dict[str, tuple[GroupRows, ...]]:
    slots = forward.groups[0].slots.copy()
    slots[3] = slot
    return _rows(forward, slots=slots)


def _sequence(forward: ForwardPass, **changes: Any) -> dict[str, tuple[GroupRows, ...]]:
    sequence: SequenceRows = replace(forward.groups[0].sequences[0], **changes)
    return _rows(forward, sequences=(sequence,))


def _twice_in_block_5(forward: ForwardPass) -> dict[str, tuple[GroupRows, ...]]:
    slots = forward.groups[0].slots.copy()
    slots[16:32] = slots[:16]
    sequence = replace(forward.groups[0].sequences[0], block_ids=(5, 5, 9))
    return _rows(forward, slots=slots, sequences=(sequence,))


CONTRADICTIONS: dict[str, tuple[Callable[[ForwardPass], dict[str, Any]], str]] = {
    "slot_in_block_0": (lambda p: _slot(p, 3), "slots follow the table"),
    "slot_outside_pool": (lambda p: _slot(p, 64 * 16), "slots follow the table"),
    "slot_written_twice": (
        _twice_in_block_5,
        "no slot is written twice",
    ),
    "block_0_in_table": (
        lambda p: _sequence(p, block_ids=(5, 0, 9)),
        "block ids lie in the pool",
    ),
    "block_outside_pool": (
        lambda p: _sequence(p, block_ids=(5, 6, 64)),
        "block ids lie in the pool",
    ),
    "table_too_short": (
        lambda p: _sequence(p, block_ids=(5, 6)),
        "2 blocks, 3 are read",
    ),
    "token_outside_vocabulary": (
        lambda p: {"token_ids": np.full(40, 160)},
        "token id in vocabulary",
    ),
    "negative_token": (lambda p: {"token_ids": np.full(40, -1)}, "token ids are not negative"),
    "positions_with_a_gap": (
        lambda p: {"positions": p.positions + (p.positions > 7)},
        "positions are consecutive",
    ),
    "position_beyond_context": (
        lambda p: {"positions": p.positions + 500},
        "within context",
    ),
    "rows_of_nobody": (
        lambda p: _sequence(p, query_token_count=39),
        "positions are consecutive|every row belongs",
    ),
    "logit_row_outside": (lambda p: {"logit_rows": np.array([40])}, "logit rows are rows"),
    "no_tokens": (
        lambda p: {
            "token_ids": p.token_ids[:0],
            "positions": p.positions[:0],
        },
        "at least one token",
    ),
    "copy_to_block_0": (lambda p: {"copies": (BlockCopy(3, 0, 4),)}, "target_block_id=0"),
    "copy_of_too_many_tokens": (lambda p: {"copies": (BlockCopy(3, 4, 17),)}, "token_count=17"),
    "copy_chain": (
        lambda p: {"copies": (BlockCopy(3, 4, 1), BlockCopy(4, 7, 1))},
        "both source and target",
    ),
    "two_copies_to_one_target": (
        lambda p: {"copies": (BlockCopy(3, 4, 1), BlockCopy(2, 4, 1))},
        "target of one copy",
    ),
}


@pytest.mark.parametrize("name", sorted(CONTRADICTIONS))
def test_contradictory_pass_is_refused_and_writes_nothing(harness: PagedHarness, name: str) -> None:
    """The worker checks again what the controller promised."""
    changes, message = CONTRADICTIONS[name]
    forward = _pass(harness)
    with pytest.raises(AssertionError, match=message):
        harness.runner.run(replace(forward, **changes(forward)))
    assert not any(harness.kv.layer(layer).keys.any() for layer in range(harness.kv.page_count))


def test_pass_writes_its_slots_and_no_other() -> None:
    """The three rows that a strict pass of 33 tokens is padded with go to slot 0."""
    strict = PagedHarness(random_model(gpt2_config()), backend="strict")
    strict.whole(TOKENS[:33], TABLE)
    written = strict.kv.layer(1).keys.abs().sum((1, 2)).nonzero().flatten()
    expected = [0, *range(80, 112), 144]
    assert expected == written.tolist()


def test_logit_rows_choose_the_logits(harness: PagedHarness) -> None:
    """A chunk that wants no logits gets none; the last rows of another are the same as always."""
    everything = harness.whole(TOKENS, TABLE)
    silent = replace(harness.chunk(TOKENS, TABLE, 0, 20), logit_token_count=0)
    assert harness.run(silent)[0].shape == (0, 160)
    last = replace(harness.chunk(TOKENS, TABLE, 20, 40), logit_token_count=2)
    torch.testing.assert_close(harness.run(last)[0], everything[-2:], atol=1e-4, rtol=0.0)


def test_s16_copies_come_before_writes(harness: PagedHarness) -> None:
    """S16: a child's copy holds what the parent's block held before the parent's own write."""
    harness.run(harness.chunk(TOKENS, TABLE, 0, 36))
    child = [*TOKENS[:36], 7, 8]
    parent, fork = harness.run(
        harness.chunk(TOKENS, TABLE, 36, 40),
        harness.chunk(child, (5, 6, 20), 36, 38),
        copies=[BlockCopy(9, 20, 4)],
    )
    twin = eager_twin(harness.model)
    expected = eager_logits(twin, TOKENS)[36:]
    torch.testing.assert_close(parent, expected, atol=2e-4, rtol=0.0)
    expected = eager_logits(twin, child)[36:]
    torch.testing.assert_close(fork, expected, atol=2e-4, rtol=0.0)


def test_copies_can_be_executed_alone(harness: PagedHarness) -> None:
    """A step may carry copies and no tokens; the rest of the target stays."""
    harness.run(harness.chunk(TOKENS, TABLE, 0, 40))
    before = harness.kv.layer(2).values.clone()
    harness.runner.copy((BlockCopy(source_block_id=5, target_block_id=6, token_count=3),))
    after = harness.kv.layer(2).values
    assert torch.equal(after[96:99], before[80:83])
    assert torch.equal(after[99:112], before[99:112])


def test_two_models_in_one_process_do_not_interfere() -> None:
    """Their passes alternate; each answers with its own weights and its own pool."""
    harnesses = [
        PagedHarness(random_model(llama_config(), seed=1), backend="torch"),
        PagedHarness(random_model(llama_config(), seed=2), backend="torch"),
        PagedHarness(random_model(gpt2_config()), backend="torch", block_size=4),
    ]
    tables = (TABLE, (8, 2, 3), range(1, 11))
    for start, end in ((0, 25), (25, 40)):
        outputs = [
            harness.run(harness.chunk(TOKENS, table, start, end))[0]
            for harness, table in zip(harnesses, tables, strict=True)
        ]
    for harness, output in zip(harnesses, outputs, strict=True):
        expected = eager_logits(eager_twin(harness.model), TOKENS)[25:]
        torch.testing.assert_close(output, expected, atol=2e-4, rtol=0.0)


def test_model_can_run_again_after_a_failed_forward(
    harness: PagedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure inside a forward leaves no handler behind."""
    with monkeypatch.context() as patch:
        patch.setattr(harness.kv, "store", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            harness.whole(TOKENS, TABLE)
    expected = eager_logits(eager_twin(harness.model), TOKENS)
    torch.testing.assert_close(harness.whole(TOKENS, TABLE), expected, atol=2e-4, rtol=0.0)


def test_flatten_refuses_a_chunk_without_tokens() -> None:
    """An empty chunk is a caller's fault."""
    with pytest.raises(AssertionError, match="at least one token"):
        flatten([Chunk([], 0, [[1]], [[]], 0)])


def test_pool_size_in_bytes(harness: PagedHarness) -> None:
    """K and V: 64 blocks of 16 slots, 3 layers, 2 heads of 16 float32 each."""
    assert 64 * 16 * 3 * 2 * (16 + 16) * 4 == harness.kv.byte_count
