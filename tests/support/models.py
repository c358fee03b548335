"""Small random models of several families, and a stand-in for the engine's block bookkeeping."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.model.forward import BlockCopy, Chunk, flatten
from prefixd.worker.model.guard import check_config
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import load_folder
from prefixd.worker.model.runner import ModelRunner
from tests.support.families import SHAPE

CPU = torch.device("cpu")

_SHAPE: dict[str, Any] = {**SHAPE, "num_hidden_layers": 3}


def llama_config(**changes: Any) -> PreTrainedConfig:
    """Grouped query attention."""
    return LlamaConfig(**{**_SHAPE, **changes})


def qwen3_config() -> PreTrainedConfig:
    """Normalised queries and keys; heads wider than hidden size / heads."""
    return Qwen3Config(**_SHAPE, head_dim=32)


def gpt2_config() -> PreTrainedConfig:
    """Learned positions, a key and value head per query head, biases."""
    return GPT2Config(
        vocab_size=160,
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )


def gemma2_config() -> PreTrainedConfig:
    """Every other layer sees a window; scores are soft-capped."""
    return Gemma2Config(**_SHAPE, head_dim=16, sliding_window=20, attn_logit_softcapping=5.0)


def gemma3_config() -> PreTrainedConfig:
    """Windows with a rotary table of their own."""
    return Gemma3TextConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def mixed_config(**changes: Any) -> PreTrainedConfig:
    """Gemma 3 with six layers of a window and two of full attention."""
    layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
    shape = {**_SHAPE, "num_hidden_layers": len(layers), "initializer_range": 0.1}
    return Gemma3TextConfig(
        **{**shape, "head_dim": 16, "sliding_window": 20, "layer_types": layers, **changes}
    )


def write_mixed_model(folder: Path, *, vocabulary_size: int) -> Path:
    """Writes `mixed_config` with random weights, the same each time, and without a tokenizer."""
    auto_model: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        config = mixed_config(vocab_size=vocabulary_size)
        auto_model.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def gpt_oss_config() -> PreTrainedConfig:
    """Sinks, windows, a mixture of experts."""
    return GptOssConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=20,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


CONFIGS = {
    "llama": llama_config,
    "qwen3": qwen3_config,
    "gpt2": gpt2_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "gpt_oss": gpt_oss_config,
}


def in_one_group(model: LoadedModel) -> LoadedModel:
    """The same model with one KV group, so that a sequence has one block table."""
    layer_indices = tuple(range(len(model.geometry)))
    return replace(model, groups=(KvGroup(layer_indices=layer_indices),))


def load_random(
    config: PreTrainedConfig, *, name: str, seed: int, backend: AttentionBackend
) -> LoadedModel:
    """A model with random weights, the same for the same seed, as the loader takes it from disk.

    Raises:
        ModelRefused: by the loader's guard.
    """
    auto_model: Any = AutoModelForCausalLM
    check_config(config, model_name=name)  # some that it refuses cannot be made at all
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = auto_model.from_config(config, dtype=torch.float32, attn_implementation="eager")
        network.save_pretrained(folder)
        return load_folder(
            Path(folder), name=name, backend=backend, device=CPU, dtype=torch.float32
        )


def random_model(config: PreTrainedConfig, *, seed: int = 1) -> LoadedModel:
    """A tiny model with paged attention, in float32."""
    return load_random(config, name=config.model_type, seed=seed, backend=create_backend("torch"))


def eager_twin(model: LoadedModel) -> Any:
    """The same weights in a transformers model of its own, with its own eager attention."""
    config = model.network.config.__class__.from_dict(model.network.config.to_dict())
    auto_model: Any = AutoModelForCausalLM
    twin = auto_model.from_config(config, dtype=torch.float32, attn_implementation="eager")
    twin.load_state_dict(model.network.state_dict())
    return twin.eval()


def eager_folder(folder: Path) -> Any:
    """A transformers model from a folder, with its own eager attention."""
    auto_model: Any = AutoModelForCausalLM
    return auto_model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def eager_logits(network: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits of every position by a plain forward without any cache: (tokens, vocabulary)."""
    with torch.inference_mode():
        logits: Tensor = network(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def random_tokens(count: int, *, below: int, seed: int) -> list[int]:
    """The same token ids for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, below, (count,), generator=generator).tolist()
    return tokens


class PagedHarness:
    """A runner with a pool, and chunks made from token lists and block tables."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        backend: str,
        block_count: int = 64,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.kv = PagedKv(
            model.page_geometry,
            block_count=block_count,
            block_size=block_size,
            dtype=model.dtype if kv_dtype is None else kv_dtype,
            device=model.device,
        )
        self.runner = ModelRunner(model, self.kv, create_backend(backend))

    def chunk(
        self, token_ids: Sequence[int], block_ids: Sequence[int], start: int, end: int
    ) -> Chunk:
        """Tokens [start, end) of a sequence, all wanting logits; of a model of one KV group."""
        return self.chunk_of_groups(token_ids, (block_ids,), start, end)

    def chunk_of_groups(
        self, token_ids: Sequence[int], tables: Sequence[Sequence[int]], start: int, end: int
    ) -> Chunk:
        """The same with a block table for each KV group."""
        size = self.kv.block_size
        slots = [
            [table[position // size] * size + position % size for position in range(start, end)]
            for table in tables
        ]
        return Chunk(token_ids[start:end], start, tables, slots, end - start)

    def run(self, *chunks: Chunk, copies: Sequence[BlockCopy] = ()) -> list[Tensor]:
        """Runs one pass; the logits of each chunk."""
        logits = self.runner.run(flatten(chunks, copies))
        return list(logits.split([chunk.logit_token_count for chunk in chunks]))

    def whole(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> Tensor:
        """Logits of a whole sequence in one pass."""
        return self.run(self.chunk(token_ids, block_ids, 0, len(token_ids)))[0]


class GroupedHarness(PagedHarness):
    """The same for models of any number of KV groups, called as if there were one.

    A block id names a block of its own in each group, and no group holds blocks that its window has
    left behind.
    """

    BLOCKS_PER_GROUP = 64

    def __init__(self, model: LoadedModel, *, backend: str, kv_dtype: torch.dtype) -> None:
        block_count = self.BLOCKS_PER_GROUP * len(model.groups)
        super().__init__(model, backend=backend, block_count=block_count, kv_dtype=kv_dtype)

    def chunk(
        self, token_ids: Sequence[int], block_ids: Sequence[int], start: int, end: int
    ) -> Chunk:
        """Tokens [start, end) of a sequence, all wanting logits."""
        tables = []
        for index, group in enumerate(self.model.groups):
            first = group.first_read_block(start, block_size=self.kv.block_size)
            held = [self._of_group(index, block_id) for block_id in block_ids[first:]]
            tables.append([0] * min(first, len(block_ids)) + held)
        return self.chunk_of_groups(token_ids, tables, start, end)

    def copies(self, source: int, target: int, token_count: int) -> list[BlockCopy]:
        """The first tokens of a block to another, in every group."""
        return [
            BlockCopy(self._of_group(index, source), self._of_group(index, target), token_count)
            for index in range(len(self.model.groups))
        ]

    def _of_group(self, index: int, block_id: int) -> int:
        assert 0 < block_id < self.BLOCKS_PER_GROUP, block_id
        return index * self.BLOCKS_PER_GROUP + block_id
