"""What a CUDA graph would capture, checked without a GPU.

On device "meta" tensors have no memory; whatever would make the host wait for them is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prefixd.kernels.attention import attention_launches
from prefixd.kernels.layer_kv import LayerKv
from prefixd.kernels.options import AttentionOptions
from prefixd.kernels.planner import plan_sizes, plan_work
from prefixd.kernels.store import store_launches
from prefixd.kernels.tiling import Tiling, tiling_of_layer
from prefixd.kernels.work_buffers import WorkTensors, work_tensors
from prefixd.kernels.work_list import PassLayout
from prefixd.worker.model.attention_hook import (
    ATTENTION_NAME,
    AttentionCall,
    attach_context,
    register_attention,
)
from prefixd.worker.model.loaded import call_network
from tests.support.graphs import CaptureLint, HostSync
from tests.support.models import CONFIGS

META = torch.device("meta")
ROW_COUNT = 4
BLOCK_SIZE = 16
BLOCK_COUNT = 8


def decode_layout() -> PassLayout:
    """A decode step of four sequences."""
    return PassLayout(
        np.arange(1, 5, dtype=np.int32)[:, None],
        np.arange(4),
        np.ones(4, np.int64),
        np.array([3, 9, 16, 1]),
        ROW_COUNT,
        BLOCK_SIZE,
        BLOCK_COUNT,
    )


class TritonSteps:
    """Stores and attends as the triton backend does, up to the launches themselves.

    The first forward fills the static buffers of each layer, as a step's preparation does; later
    ones use them.
    """

    def __init__(self) -> None:
        self._planned: dict[nn.Module, tuple[Tiling, WorkTensors]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Answers one layer's call."""

        def pool(width: int) -> Tensor:
            shape = (BLOCK_COUNT * BLOCK_SIZE, call.keys.shape[1], width)
            return torch.empty(shape, dtype=call.keys.dtype, device=META)

        layer = LayerKv(pool(call.keys.shape[2]), pool(call.values.shape[2]))
        slots = torch.empty(ROW_COUNT, dtype=torch.int64, device=META)
        keys, values = call.keys, call.values
        assert store_launches(layer, keys=keys, values=values, slots=slots, block_size=BLOCK_SIZE)
        if call.module not in self._planned:
            self._planned[call.module] = planned(call, layer)
        tiling, work = self._planned[call.module]
        traits = call.traits
        options = AttentionOptions(
            traits.scaling, traits.window_token_count, traits.softcap, traits.sinks
        )
        output = call.query.new_empty((*call.query.shape[:2], layer.value_width))
        assert attention_launches(call.query, layer, work, options, tiling, output=output)
        return output


def planned(call: AttentionCall, layer: LayerKv) -> tuple[Tiling, WorkTensors]:
    """The tiling of a layer, and its static buffers."""
    tiling = tiling_of_layer(call.query, layer)
    group_size = call.query.shape[1] // layer.head_count
    sizes = plan_sizes(
        tiling, group_size=group_size, window_token_count=call.traits.window_token_count
    )
    return tiling, work_tensors(decode_layout(), plan_work(decode_layout(), sizes), device=META)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_decode_step_waits_for_nothing(family: str) -> None:
    """A whole forward, stores and attention included, never needs a number from the device."""
    register_attention()
    config = CONFIGS[family]()
    auto_model: Any = AutoModelForCausalLM
    with META:
        network = auto_model.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    network.eval()
    context = attach_context(network)
    rows = torch.empty(ROW_COUNT, dtype=torch.int64, device=META)
    steps = TritonSteps()

    def step() -> Tensor:
        return call_network(
            network, context, steps.attend, token_ids=rows, positions=rows, logit_rows=rows
        )

    step()
    with CaptureLint():
        logits = step()
    assert (ROW_COUNT, config.vocab_size) == logits.shape


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.to("meta"),
    ],
    ids=["item", "nonzero", "mask", "copy"],
)
def test_the_lint_sees_what_waits(wait: Callable[[Tensor], Any]) -> None:
    """Each kind of waiting is found."""
    with pytest.raises(HostSync), CaptureLint():
        wait(torch.ones(3))
