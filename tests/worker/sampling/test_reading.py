"""What is read from logits, and which reads want one token each."""

from __future__ import annotations

import pytest
import torch

from prefixd.worker.reading import LogitRead, read_logits, single_draws
from prefixd.worker.sampling import Draw, SamplingOptions, choose

GREEDY = Draw(SamplingOptions(), 0)
DRAWN = Draw(SamplingOptions(temperature=1.0, seed=9), 4)


def test_chunks_are_read_side_by_side() -> None:
    """Targets, several draws of a row, likeliest tokens and nothing at all, in one go."""
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(2))
    logprobs = torch.log_softmax(logits, dim=-1)
    reads = [
        LogitRead(target_token_ids=(3, 29)),
        LogitRead(draws=((GREEDY, DRAWN), (GREEDY,))),
        LogitRead(),
        LogitRead(target_token_ids=(7,), draws=((DRAWN,),), top_count=2),
    ]
    targets, drawn, nothing, everything = read_logits(logits, [2, 2, 1, 2], reads)
    assert targets.target_logprobs == (logprobs[0, 3].item(), logprobs[1, 29].item())
    assert drawn.token_ids == (
        (int(logits[2].argmax()), int(choose(logits[2:3], [DRAWN]))),
        (int(logits[3].argmax()),),
    )
    assert (nothing.target_logprobs, nothing.token_ids, nothing.top) == ((), (), ())
    assert everything.target_logprobs == (logprobs[5, 7].item(),)
    assert everything.token_ids == ((int(choose(logits[6:7], [DRAWN])),),)
    expected = torch.topk(logprobs[6], 2)
    assert [one.token_id for one in everything.top] == expected.indices.tolist()
    assert [one.logprob for one in everything.top] == expected.values.tolist()


def test_more_likeliest_tokens_than_there_are() -> None:
    """The whole vocabulary is told."""
    (reading,) = read_logits(torch.tensor([[1.0, 3.0, 2.0]]), [1], [LogitRead(top_count=9)])
    assert [one.token_id for one in reading.top] == [1, 2, 0]


@pytest.mark.parametrize(
    "read",
    [
        LogitRead(),
        LogitRead(draws=((GREEDY, DRAWN),)),
        LogitRead(draws=((GREEDY,), (DRAWN,))),
        LogitRead(draws=((GREEDY,),), top_count=1),
        LogitRead(draws=((GREEDY,),), target_token_ids=(1,)),
    ],
    ids=["nothing", "two of a row", "two rows", "top", "target"],
)
def test_single_draws_are_told_from_others(read: LogitRead) -> None:
    """One token each and nothing else."""
    single = LogitRead(draws=((DRAWN,),))
    assert single_draws([single, single]) == [DRAWN, DRAWN]
    assert single_draws([single, read]) is None
