"""Measures what a model needs on a GPU beside its weights and its pool."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from prefixd.worker.attention.seam import AttentionBackend, RecordableBackend
from prefixd.worker.limits import SchedulerLimits
from prefixd.worker.model.forward import BlockCopy, Chunk, ForwardPass, flatten
from prefixd.worker.model.graphs import CudaGraphRecorder
from prefixd.worker.model.graphs_decode import DecodeGraphs
from prefixd.worker.model.kv_cache import PagedKv
from prefixd.worker.model.loaded import LoadedModel
from prefixd.worker.model.memory import MEBIBYTE, DeviceMemory
from prefixd.worker.model.runner import ModelRunner
from prefixd.worker.reading import LogitRead, read_logits
from prefixd.worker.sampling import Draw, SamplingOptions

GRAPH_OVERHEAD_BYTE_COUNT = 4 * MEBIBYTE
"""What a recording keeps beside the memory that its operations share: the nodes of its graph."""
ANY_TOKEN_ID = 1
"""Every vocabulary has it; 0 is often padding, whose embedding is nothing but zeros."""
WARM_UP_TOKEN_COUNTS = (1, 17, 40, 300)
"""Chunks that together make attention use each of its kernels: one row, few, many, a long query.
Shorter ones come first, for a small pool has no room for all."""


def largest_pass(model: LoadedModel, limits: SchedulerLimits, *, block_size: int) -> ForwardPass:
    """A pass that spends a whole step's budget on prompts and wants the logits of every token.

    Its slots lie in blocks from 1 on: as many as `profile_block_count` says.
    """
    token_count_max = min(limits.chunk_token_count_max, model.context_token_count_max)
    whole_count, rest = divmod(limits.token_budget, token_count_max)
    token_counts = [token_count_max] * whole_count + ([rest] if rest else [])
    return flatten(_prompts(token_counts, group_count=len(model.groups), block_size=block_size))


def profile_block_count(forward: ForwardPass) -> int:
    """Blocks of a pool that such a pass runs in."""
    return 1 + max(max(rows.block_ids) for group in forward.groups for rows in group.sequences)


def run_largest_pass(runner: ModelRunner, limits: SchedulerLimits, forward: ForwardPass) -> None:
    """Computes the pass, and reads of its logits what takes most memory."""
    logits = runner.run(forward)
    counts = [rows.query_token_count for rows in forward.groups[0].sequences]
    read_logits(logits, counts, [LogitRead(target_token_ids=(0,) * count) for count in counts])
    row_count = min(limits.running_sequence_count_max, len(logits))
    draw = Draw(SamplingOptions(temperature=1.0, top_k=1), 0)
    reads = [LogitRead(draws=((draw,),), top_count=1)] * row_count
    read_logits(logits[:row_count], [1] * row_count, reads)


def measure_memory(
    model: LoadedModel,
    backend: AttentionBackend,
    limits: SchedulerLimits,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    records_graphs: bool,
) -> DeviceMemory:
    """Runs the largest pass, and records the largest pass of decode, in a pool of their own.

    Whatever was compiled on the way stays compiled; the memory is given back.
    """
    device = model.device

    def allocated() -> int:
        return torch.cuda.memory_allocated(device)

    weights = allocated()
    forward = largest_pass(model, limits, block_size=block_size)
    kv = PagedKv(
        model.page_geometry,
        block_count=profile_block_count(forward),
        block_size=block_size,
        dtype=kv_dtype,
        device=device,
    )
    runner = ModelRunner(model, kv, backend)
    before = allocated()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_pass(runner, limits, forward)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    graphs = 0
    if records_graphs and isinstance(backend, RecordableBackend):
        graphs = _graph_byte_count(model, kv, backend, limits, device=device)
    del runner, kv
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total=total, free=free, weights=weights, activations=activations, graphs=graphs
    )


def _graph_byte_count(
    model: LoadedModel,
    kv: PagedKv,
    backend: RecordableBackend,
    limits: SchedulerLimits,
    *,
    device: torch.device,
) -> int:
    """Memory of all recordings: the largest one's, which the others share, and a bit for each.

    None at all where the largest cannot be recorded: whoever is to record tells why.
    """

    def free() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    before = free()
    graphs = DecodeGraphs(
        model,
        kv,
        backend,
        CudaGraphRecorder(device),
        row_count_max=limits.running_sequence_count_max,
        context_token_count_max=model.context_token_count_max,
    )
    try:
        graphs.record_largest()
    except RuntimeError:
        return 0
    largest = max(0, before - free())
    return largest + graphs.graph_count * GRAPH_OVERHEAD_BYTE_COUNT


def warm_up(runner: ModelRunner) -> None:
    """Runs passes of every kind, so that all kernels are compiled before anybody waits for them.

    Call it while the pool is empty: it writes to some blocks.
    """
    model, kv = runner.model, runner.kv
    token_counts = [
        count for count in WARM_UP_TOKEN_COUNTS if count <= model.context_token_count_max
    ]
    prompts = _prompts(token_counts, group_count=len(model.groups), block_size=kv.block_size)
    fitting = [chunk for chunk in prompts if chunk.tables[-1][-1] < kv.block_count]
    if fitting:
        runner.run(flatten([replace(chunk, logit_token_count=1) for chunk in fitting]))
    if kv.block_count > 2:
        runner.copy((BlockCopy(source_block_id=1, target_block_id=2, token_count=1),))


def _prompts(token_counts: Sequence[int], *, group_count: int, block_size: int) -> list[Chunk]:
    """Prompts that want all logits, each in blocks of its own: consecutive ones, from block 1 on.

    Blocks go to one KV group after the other, so the last table of a prompt ends with its last one.
    """
    chunks, next_block = [], 1
    for token_count in token_counts:
        block_count = -(-token_count // block_size)
        end_block = next_block + group_count * block_count
        firsts = range(next_block, end_block, block_count)
        chunks.append(
            Chunk(
                [ANY_TOKEN_ID] * token_count,
                0,
                [range(first, first + block_count) for first in firsts],
                [range(first * block_size, first * block_size + token_count) for first in firsts],
                token_count,
            )
        )
        next_block = end_block
    return chunks
