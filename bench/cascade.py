"""What it saves that rows which share a prefix read it once."""

from functools import partial

import torch

from bench.figures import Figure
from bench.measure import Timed, in_turns, ratio_of
from bench.small_model import (
    SHARED_TOKEN_COUNT,
    SHARING_COUNT,
    decode_pass,
    filled_runner,
    small_model,
)
from prefixd.worker.attention.batch import AttentionBatch
from prefixd.worker.attention.sdpa import SdpaBackend, SdpaPlan

ROUND_COUNT = 9
DIFFERENCE_MAX = 1e-3
"""Largest difference of logits between the two ways, relative to the largest logit; random KV is no
text, and 30 layers make much of the last bits."""


class WithoutCascade(SdpaBackend):
    """The torch backend with a fused attention for each row, whatever rows share."""

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Treats decode rows like any others."""
        return SdpaPlan(batch, batch.sequences, None)


def cascade_figures() -> list[Figure]:
    """Measures whole decode steps of the small model, with and without cascade in turns."""
    model = small_model()
    forward = decode_pass(SHARING_COUNT)
    runners = {
        "with": filled_runner(model, SdpaBackend(), kv_dtype=model.dtype),
        "without": filled_runner(model, WithoutCascade(), kv_dtype=model.dtype),
    }
    logits = [runner.run(forward) for runner in runners.values()]
    scale = float(logits[1].abs().max())
    torch.testing.assert_close(*logits, atol=DIFFERENCE_MAX * scale, rtol=0.0)
    samples = in_turns(
        {name: Timed(partial(runner.run, forward)) for name, runner in runners.items()},
        round_count=ROUND_COUNT,
        warm_up_count=1,
    )
    return [
        Figure(
            f"decode step of {SHARING_COUNT} sequences on {SHARED_TOKEN_COUNT:,} shared tokens,"
            " without cascade",
            samples["without"].median_us / 1000,
            "ms",
            baseline="with cascade",
            baseline_value=samples["with"].median_us / 1000,
            ratio=ratio_of(samples["without"], samples["with"]),
            target=1.6,
            at_least=True,
        )
    ]
