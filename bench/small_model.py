"""Decode steps of the small real model in this process, over a pool that is filled at random."""

import torch
from transformers.utils.logging import disable_progress_bar

from prefixd.worker.attention.registry import create_backend
from prefixd.worker.attention.seam import AttentionBackend
from prefixd.worker.model.fetch import MODEL_DEFAULT, model_folder
from prefixd.worker.model.forward import Chunk, ForwardPass, flatten
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.loader import load_folder
from prefixd.worker.model.runner import ModelRunner

BLOCK_SIZE = 16
SHARED_TOKEN_COUNT = 2_048
SHARING_COUNT = 16
"""Sequences that decode together, at most."""
OWN_BLOCK_COUNT = 2
"""Blocks that each of them has for itself."""
_SHARED_BLOCK_COUNT = SHARED_TOKEN_COUNT // BLOCK_SIZE


def small_model() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, on one thread."""
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # theirs
    return load_folder(
        model_folder(MODEL_DEFAULT, report=print),
        name=MODEL_DEFAULT,
        backend=create_backend("torch"),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def filled_runner(
    model: LoadedModel, backend: AttentionBackend, *, kv_dtype: torch.dtype
) -> ModelRunner:
    """A runner whose pool holds a shared context and what each sequence has for itself."""
    kv = PagedKv(
        model.page_geometry,
        block_count=1 + _SHARED_BLOCK_COUNT + SHARING_COUNT * OWN_BLOCK_COUNT,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype,
        device=model.device,
    )
    slots = torch.arange(BLOCK_SIZE, kv.slot_count)
    generator = torch.Generator().manual_seed(1)
    for page, layer in enumerate(model.page_geometry):
        keys, values = (
            torch.randn(len(slots), layer.kv_head_count, width, generator=generator)
            for width in (layer.key_width, layer.value_width)
        )
        kv.store(page, keys=keys, values=values, slots=slots)
    return ModelRunner(model, kv, backend)


def decode_pass(sequence_count: int) -> ForwardPass:
    """A token of each sequence, the last one of its own blocks."""
    shared = tuple(range(1, 1 + _SHARED_BLOCK_COUNT))
    position = SHARED_TOKEN_COUNT + OWN_BLOCK_COUNT * BLOCK_SIZE - 1
    chunks = []
    for sequence in range(sequence_count):
        first = 1 + _SHARED_BLOCK_COUNT + sequence * OWN_BLOCK_COUNT
        table = (*shared, *range(first, first + OWN_BLOCK_COUNT))
        slot = table[-1] * BLOCK_SIZE + position % BLOCK_SIZE
        chunks.append(Chunk((3 + sequence,), position, (table,), ((slot,),), 1))
    return flatten(chunks)
