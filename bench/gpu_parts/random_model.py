"""A random Llama on the worker's runner, as somebody who loads it from a folder gets it."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from bench.gpu_parts.sizes import ModelSizes
from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.triton import TritonBackend
from prefixd.worker.model.forward import Chunk, flatten
from prefixd.worker.model.graphs import GraphRecorder
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import load_folder
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.sampling import Draw, SamplingOptions

_BLOCK_SIZE = 16
_SEED = 5


class RandomModel:
    """A model and its pool, made when they are first wanted.

    Attributes:
        sizes: of the model, and of what is asked of it.
        device: where it is.
    """

    def __init__(self, sizes: ModelSizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device

    @cached_property
    def model(self) -> LoadedModel:
        """The model, past the worker's guard."""
        auto_model: Any = AutoModelForCausalLM
        # Standard output is for the table.
        disable_progress_bar()  # type: ignore[no-untyped-call] # theirs
        torch.manual_seed(_SEED)
        with tempfile.TemporaryDirectory() as folder:
            with self.device:
                network = auto_model.from_config(self._config(), dtype=self.sizes.dtype)
            network.save_pretrained(folder)
            del network
            return load_folder(
                Path(folder),
                name="random",
                backend=self._backend,
                device=self.device,
                dtype=self.sizes.dtype,
            )

    @cached_property
    def kv(self) -> PagedKv:
        """A pool for the longest prompt and the largest step, full of noise."""
        sizes = self.sizes
        prompt = max(sizes.shared_token_counts) + sizes.own_token_count
        decode = max(sizes.decode_counts) * _block_count(sizes.decode_context_token_count)
        kv = PagedKv(
            self.model.page_geometry,
            block_count=1 + max(_block_count(prompt), decode),
            block_size=_BLOCK_SIZE,
            dtype=self.sizes.dtype,
            device=self.device,
        )
        generator = torch.Generator(self.device).manual_seed(_SEED)
        for page in range(kv.page_count):
            for tensor in kv.layer(page).tensors:
                tensor.normal_(generator=generator)
        return kv

    @cached_property
    def eager(self) -> ModelRunner:
        """Launches the work of every pass one by one."""
        return ModelRunner(self.model, self.kv, self._backend)

    def recorded(self, recorder: GraphRecorder) -> ModelRunner:
        """Replays recordings of passes of decode."""
        graphs = DecodeGraphs(
            self.model,
            self.kv,
            self._backend,
            recorder,
            row_count_max=max(self.sizes.decode_counts),
            context_token_count_max=self.model.context_token_count_max,
        )
        graphs.record()
        return ModelRunner(self.model, self.kv, self._backend, graphs)

    def tables(self, sequence_count: int, token_count: int) -> list[tuple[int, ...]]:
        """Block tables that share nothing, for so many tokens each, scattered over the pool."""
        generator = np.random.default_rng(_SEED)
        ids = (generator.permutation(self.kv.block_count - 1) + 1).tolist()
        size = _block_count(token_count)
        return [tuple(ids[index * size : (index + 1) * size]) for index in range(sequence_count)]

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        generator = np.random.default_rng(_SEED)
        token_ids: list[int] = generator.integers(0, self.sizes.vocabulary_size, count).tolist()
        return token_ids

    @cached_property
    def _backend(self) -> TritonBackend:
        backend = create_backend("triton")
        assert isinstance(backend, TritonBackend), backend
        return backend

    def _config(self) -> LlamaConfig:
        sizes = self.sizes
        return LlamaConfig(
            vocab_size=sizes.vocabulary_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.layer_count,
            num_attention_heads=sizes.query_head_count,
            num_key_value_heads=sizes.kv_head_count,
            head_dim=sizes.head_width,
            max_position_embeddings=max(sizes.shared_token_counts) + 2 * sizes.own_token_count,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens with the table that their KV is under."""

    token_ids: Sequence[int]
    table: tuple[int, ...]

    def chunks(self, start: int, *, chunk_token_count: int) -> list[Chunk]:
        """The rest of the prompt, cut as a worker would; the last chunk wants logits."""
        count = len(self.token_ids)
        starts = range(start, count, chunk_token_count)
        return [self.chunk(first, min(first + chunk_token_count, count)) for first in starts]

    def chunk(self, start: int, end: int) -> Chunk:
        """Tokens [start, end); wants logits where it ends the prompt."""
        slots = [
            self.table[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
            for position in range(start, end)
        ]
        logit_count = 1 if end == len(self.token_ids) else 0
        return Chunk(self.token_ids[start:end], start, (self.table,), (slots,), logit_count)


def first_token(runner: ModelRunner, chunks: Sequence[Chunk]) -> int:
    """Computes chunks one after the other; the likeliest token behind the last, on the host."""
    *head, last = chunks
    for chunk in head:
        runner.run(flatten([chunk]))
    (token_id,) = next_tokens(runner, [last])
    return token_id


def next_tokens(runner: ModelRunner, chunks: Sequence[Chunk]) -> list[int]:
    """Computes chunks of several sequences in one pass; the likeliest token behind each."""
    draws = [Draw(SamplingOptions(), chunk.start_position + 1) for chunk in chunks]
    token_ids: list[int] = runner.draw(flatten(chunks), draws).tolist()
    return token_ids


def _block_count(token_count: int) -> int:
    return -(-token_count // _BLOCK_SIZE)
