"""What cannot be split is refused with the reason, before anything large is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)
from typer.testing import CliRunner

from prefixd.worker.__main__ import app
from prefixd.worker.config import ConfigInvalid
from prefixd.worker.model.errors import ModelRefused
from prefixd.worker.parallel.loading import rank_device
from prefixd.worker.parallel.plan import check_split
from tests.worker.parallel.conftest import options

HEADS: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}


@pytest.mark.parametrize(
    ("config", "rank_count", "reason"),
    [
        (GPT2Config(), 2, "transformers has no tensor parallel plan for it"),
        (Phi3Config(pad_token_id=0), 2, "plan for it does not split its KV heads"),
        (
            LlamaConfig(**HEADS),
            4,
            "its 6 heads (num_key_value_heads) cannot be split evenly over 4 ranks",
        ),
        (
            Qwen3Config(**HEADS),
            5,
            "its 12 heads (num_attention_heads) cannot be split evenly over 5 ranks",
        ),
    ],
    ids=["no plan", "whole heads", "KV heads left over", "query heads left over"],
)
def test_a_model_that_cannot_be_split_is_refused(
    config: PreTrainedConfig, rank_count: int, reason: str
) -> None:
    """The reason names what is in the way."""
    with pytest.raises(ModelRefused) as caught:
        check_split(config, rank_count=rank_count, model_name="odd")

    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("config", "rank_count"),
    [(LlamaConfig(**HEADS), 3), (DeepseekV2Config(num_key_value_heads=32), 8)],
    ids=["llama", "latent attention"],
)
def test_a_model_with_heads_for_every_rank_is_not_refused(
    config: PreTrainedConfig, rank_count: int
) -> None:
    """As its configuration tells; its numbers are compared later."""
    check_split(config, rank_count=rank_count, model_name="even")


def test_more_ranks_than_gpus_are_refused() -> None:
    """A rank has a GPU of its own."""
    ours = torch.cuda.device_count()
    with pytest.raises(ConfigInvalid, match=f"this machine has {ours} usable GPUs"):
        rank_device(torch.device("cuda"), rank=0, rank_count=ours + 1)


def test_one_gpu_of_several_is_refused() -> None:
    """Ranks take the first ones."""
    with pytest.raises(ConfigInvalid, match="--device cuda:1 names one GPU"):
        rank_device(torch.device("cuda:1"), rank=0, rank_count=2)


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        (["--tensor-parallel", "0"], 2, "--tensor-parallel is 0, but must be 1 to 64"),
        (["--lora", "a=/x"], 2, "--lora and --tensor-parallel cannot be combined"),
        (["--tensor-parallel", "3"], 3, "cannot be split evenly over 3 ranks"),
    ],
)
def test_the_command_refuses_with_one_line(
    four_heads: Path, bad: list[str], status: int, message: str
) -> None:
    """And the status that says whose mistake it is."""
    result = CliRunner().invoke(app, [*options(four_heads, "127.0.0.1:1"), *bad])

    assert result.exit_code == status
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert message in line
