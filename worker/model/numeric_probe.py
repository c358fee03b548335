"""Compares paged attention with a model's own eager attention on a small copy of it.

The copy has random weights, few layers and a small vocabulary, but the model's own code, heads and
layer types. What the other checks cannot see (a mask made elsewhere, a bias added on the side)
shows here as a difference.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.kv_groups import KvGroup
from prefixd.worker.model.attention_hook import ATTENTION_NAME, attach_context
from prefixd.worker.model.errors import ModelRefused
from prefixd.worker.model.forward import Chunk, flatten
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.lora import LoraSwitch
from prefixd.worker.model.probe import probe_layers
from prefixd.worker.model.runner import ModelRunner

DIFFERENCE_MAX = 1e-4
"""Largest difference of logits, relative to the largest logit."""

_LAYER_COUNT_MIN = 2
_VOCABULARY_SIZE_MAX = 256
_INTERMEDIATE_SIZE_MAX = 64
# Small enough that the probe's sequences reach beyond it.
_WINDOW_TOKEN_COUNT_MAX = 7
_SIZE_LIMITS = {
    "vocab_size": _VOCABULARY_SIZE_MAX,
    "vocab_size_per_layer_input": _VOCABULARY_SIZE_MAX,
    "intermediate_size": _INTERMEDIATE_SIZE_MAX,
    "moe_intermediate_size": _INTERMEDIATE_SIZE_MAX,
    "shared_expert_intermediate_size": _INTERMEDIATE_SIZE_MAX,
    "ffn_dim": _INTERMEDIATE_SIZE_MAX,
    "sliding_window": _WINDOW_TOKEN_COUNT_MAX,
    "attention_chunk_size": _WINDOW_TOKEN_COUNT_MAX,
    "attention_window_size": _WINDOW_TOKEN_COUNT_MAX,
    "window_size": _WINDOW_TOKEN_COUNT_MAX,
}
"""Sizes of a configuration that the copy has no more than; none of them is attention's own."""
_BLOCK_SIZE = 4
_SEED = 20_240_229

# Tables are scattered and out of order on purpose; the second sequence shares the first two blocks.
_FIRST_TABLE = (9, 3, 12, 5, 14, 7, 2, 11)
_SECOND_TABLE = (9, 3, 4, 13, 6)
_FIRST_TOKEN_COUNT = 30
_SECOND_TOKEN_COUNT = 19
_SHARED_TOKEN_COUNT = 8
_BLOCK_COUNT = 16


def in_place(network: Any) -> Any:
    """The same model, from now on with paged attention."""
    network.set_attn_implementation(ATTENTION_NAME)
    return network


def check_numbers(
    config: Any,
    backend: AttentionBackend,
    *,
    device: torch.device,
    model_name: str,
    paged_twin: Callable[[Any], Any] = in_place,
) -> None:
    """Runs the copy both ways, in float32.

    Args:
        config: of the whole model; not changed.
        backend: computes the paged side.
        device: where the copy runs.
        model_name: for the error.
        paged_twin: gives a model of the same weights its paged side; called once the eager side
            has run.

    Raises:
        ModelRefused: the logits differ, or a backend that promises bitwise equality breaks its
            promise on this machine.
    """
    with _refusing(model_name, "no small copy of it can be made to check attention"):
        network = _small_copy(config, device)
    first, second = _prompts(network.config.get_text_config().vocab_size, device)
    with _refusing(model_name, "its own attention fails on a small random copy"):
        expected = [_eager_logits(network, first), _eager_logits(network, second)]
    runner = _runner_of(paged_twin(network), backend, model_name=model_name)
    actual = _paged_logits(runner, first, second)
    for eager, paged in zip(expected, actual, strict=True):
        difference = float((eager - paged).abs().max() / eager.abs().max())
        if not difference <= DIFFERENCE_MAX:  # NaN fails too
            reason = (
                f"on a small random copy, paged attention and the model's own differ by "
                f"{difference:.1e}, above {DIFFERENCE_MAX:.0e}"
            )
            raise ModelRefused(model_name=model_name, reason=reason)
    if backend.is_bitwise_reproducible and not _is_reproducible(runner, first, actual[0]):
        reason = (
            "its layers are not bitwise reproducible on this machine (a mixture of experts is not: "
            "the tokens of a pass share its matrix products by their routing; nor are sums over "
            "more than two ranks)"
        )
        raise ModelRefused(model_name=model_name, reason=reason)


def reduced_config(config: Any) -> Any:
    """A copy of a configuration with few layers, of every type that the model has."""
    reduced = copy.deepcopy(config)
    text = reduced.get_text_config()
    full_count = text.num_hidden_layers
    layer_count = _layer_count_of(getattr(text, "layer_types", None) or ())
    if getattr(text, "num_kv_shared_layers", 0):
        layer_count *= 2
    layer_count = min(full_count, layer_count)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == full_count:
            setattr(text, name, value[:layer_count])
    text.num_hidden_layers = layer_count
    if getattr(text, "num_kv_shared_layers", 0):
        # The last layers read the KV of earlier ones: as many of them as there are donors.
        text.num_kv_shared_layers = layer_count // 2
    for name, limit in _SIZE_LIMITS.items():
        size = getattr(text, name, None)
        if isinstance(size, int):
            setattr(text, name, min(size, limit))
        elif isinstance(size, list | tuple):  # one per layer
            setattr(text, name, [min(of_layer, limit) for of_layer in size])
    # An embedding may have a row of zeros at the padding token, which must be in the vocabulary.
    padding = getattr(text, "pad_token_id", None)
    if isinstance(padding, int):
        text.pad_token_id = min(padding, text.vocab_size - 1)
    if hasattr(text, "initializer_range"):
        # Wide enough that attention is far from uniform.
        text.initializer_range = 2.0 / math.sqrt(text.hidden_size)
    return reduced


def _layer_count_of(layer_types: Sequence[str]) -> int:
    """Layers up to the first one of the last type to appear."""
    firsts = [layer_types.index(layer_type) + 1 for layer_type in set(layer_types)]
    return max(_LAYER_COUNT_MIN, *firsts) if firsts else _LAYER_COUNT_MIN


@contextmanager
def _refusing(model_name: str, what: str) -> Iterator[None]:
    """Refuses a model whose own code fails, whatever it raises."""
    try:
        yield
    except Exception as error:
        raise ModelRefused(model_name=model_name, reason=f"{what}: {error}") from error


def _small_copy(config: Any, device: torch.device) -> Any:
    auto_model: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        network = auto_model.from_config(
            reduced_config(config), dtype=torch.float32, attn_implementation="eager"
        )
    return network.to(device).eval()


def _prompts(vocabulary_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    first = torch.randint(0, vocabulary_size, (_FIRST_TOKEN_COUNT,), generator=generator)
    rest = torch.randint(0, vocabulary_size, (_SECOND_TOKEN_COUNT,), generator=generator)
    second = torch.cat([first[:_SHARED_TOKEN_COUNT], rest[_SHARED_TOKEN_COUNT:]])
    return first.to(device), second.to(device)


def _eager_logits(network: Any, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = network(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits.float()


def _runner_of(network: Any, backend: AttentionBackend, *, model_name: str) -> ModelRunner:
    context = attach_context(network)
    layers = probe_layers(network, context, model_name=model_name)
    config = network.config.get_text_config()
    model = LoadedModel(
        name=model_name,
        network=network,
        context=context,
        layer_indices={layer.module: index for index, layer in enumerate(layers)},
        geometry=tuple(layer.geometry for layer in layers),
        groups=(KvGroup(layer_indices=tuple(range(len(layers)))),),
        dtype=network.dtype,
        device=network.device,
        vocabulary_size=config.vocab_size,
        context_token_count_max=config.max_position_embeddings,
        end_token_ids=frozenset(),
        tokenizer=None,
        lora=LoraSwitch(network, ()),
        folder=None,
    )
    kv = PagedKv(
        model.geometry,
        block_count=_BLOCK_COUNT,
        block_size=_BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    return ModelRunner(model, kv, backend)


def _paged_logits(runner: ModelRunner, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both prompts in chunks: one alone, then both on a cached prefix, then a decode step each."""
    shared = _SHARED_TOKEN_COUNT
    first_end, second_end = len(first), len(second)
    head = runner.run(flatten([_chunk(first, _FIRST_TABLE, 0, shared + 3)]))
    middle = runner.run(
        flatten(
            [
                _chunk(first, _FIRST_TABLE, shared + 3, first_end - 1),
                _chunk(second, _SECOND_TABLE, shared, second_end - 1),
            ]
        )
    )
    last = runner.run(
        flatten(
            [
                _chunk(first, _FIRST_TABLE, first_end - 1, first_end),
                _chunk(second, _SECOND_TABLE, second_end - 1, second_end),
            ]
        )
    )
    split = first_end - 1 - (shared + 3)
    return (
        torch.cat([head, middle[:split], last[:1]]),
        torch.cat([head[:shared], middle[split:], last[1:]]),
    )


def _is_reproducible(runner: ModelRunner, token_ids: Tensor, expected: Tensor) -> bool:
    """Whether one pass over all tokens, and a pass for each, give the same bits as the chunks."""
    count = len(token_ids)
    whole = runner.run(flatten([_chunk(token_ids, _FIRST_TABLE, 0, count)]))
    rows = [
        runner.run(flatten([_chunk(token_ids, _FIRST_TABLE, position, position + 1)]))
        for position in range(count)
    ]
    return torch.equal(whole, expected) and torch.equal(torch.cat(rows), expected)


def _chunk(token_ids: Tensor, table: Sequence[int], start: int, end: int) -> Chunk:
    slots = [
        table[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        for position in range(start, end)
    ]
    return Chunk(token_ids[start:end].tolist(), start, (table,), (slots,), end - start)
