"""What ranks tell one another survives the pipe."""

from __future__ import annotations

import numpy as np
import pytest

from prefixd.worker.config import ModelConfig
from prefixd.worker.model.forward import BlockCopy, Chunk, ForwardPass, flatten
from prefixd.worker.parallel.frames import decode_work, encode_work
from prefixd.worker.parallel.messages import (
    Answer,
    Assignment,
    Done,
    Failed,
    Fits,
    decode_answer,
    decode_assignment,
    encode_answer,
    encode_assignment,
)

COPIES = (BlockCopy(3, 9, 2), BlockCopy(4, 10, 4))
TWO_GROUPS = (
    Chunk([5, 6, 7], 2, [(1, 2), (0, 8)], [(6, 7, 8), (34, 35, 36)], 1),
    Chunk([11], 12, [(3, 4, 5, 6), (0, 0, 0, 7)], [(24,), (28,)], 0),
    Chunk([1, 2], 0, [(9,), (10,)], [(36, 37), (40, 41)], 2),
)


@pytest.mark.parametrize(
    ("chunks", "copies"), [(TWO_GROUPS, ()), (TWO_GROUPS[:1], COPIES), (TWO_GROUPS[1:2], COPIES)]
)
def test_a_pass_arrives_as_it_was_sent(
    chunks: tuple[Chunk, ...], copies: tuple[BlockCopy, ...]
) -> None:
    """Tokens, positions, tables and slots of every group, rows of logits, copies."""
    sent = flatten(chunks, copies)

    received = decode_work(encode_work(sent))

    assert isinstance(received, ForwardPass)
    for name in ("token_ids", "positions", "logit_rows"):
        assert np.array_equal(getattr(sent, name), getattr(received, name)), name
        assert getattr(received, name).dtype == np.int64, name
    assert len(received.groups) == len(sent.groups)
    for ours, theirs in zip(sent.groups, received.groups, strict=True):
        assert np.array_equal(ours.slots, theirs.slots)
        assert ours.sequences == theirs.sequences
    assert received.copies == sent.copies
    assert received.lora_names == sent.lora_names


def test_received_arrays_can_be_written() -> None:
    """Torch takes no others without a warning."""
    received = decode_work(encode_work(flatten(TWO_GROUPS)))

    assert isinstance(received, ForwardPass)
    assert received.token_ids.flags.writeable


@pytest.mark.parametrize("copies", [COPIES, COPIES[:1]])
def test_copies_alone_arrive_as_they_were_sent(copies: tuple[BlockCopy, ...]) -> None:
    """A step may copy and compute nothing."""
    assert decode_work(encode_work(copies)) == copies


def test_an_assignment_arrives_as_it_was_sent() -> None:
    """With all that a rank needs to know of the model."""
    sent = Assignment(3, 40_123, ModelConfig(model="/a b/ü", block_size=32, rank_count=4))

    assert decode_assignment(encode_assignment(sent)) == sent


@pytest.mark.parametrize("answer", [Done(), Fits(12_345), Failed("no\nroom")])
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    """A number, or why there is none."""
    assert decode_answer(encode_answer(answer)) == answer
