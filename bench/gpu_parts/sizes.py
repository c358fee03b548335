"""How large everything is that is checked and measured: for a GPU, and for a try without one."""

from dataclasses import dataclass

import torch

from prefixd.kernels.oracle import Geometry
from prefixd.kernels.tiling import SPLIT_TOKEN_COUNT
from prefixd.kernels.variants import (
    BLOCK_SIZE,
    KV_HEAD_COUNT,
    QUERY_HEAD_COUNT,
    LayerKind,
    default_kinds,
)
from prefixd.kernels.work_list import LONG_QUERY_ROW_COUNT


@dataclass(frozen=True, slots=True)
class CheckedLayer:
    """A layer that kernels are checked on: by default, one that the kernels report is about."""

    kind: LayerKind
    query_head_count: int = QUERY_HEAD_COUNT
    kv_head_count: int = KV_HEAD_COUNT
    block_size: int = BLOCK_SIZE

    @property
    def name(self) -> str:
        """Short, for reports."""
        shape = f"{self.query_head_count}/{self.kv_head_count} heads, blocks of {self.block_size}"
        return self.kind.name if self.is_reported else f"{self.kind.name}, {shape}"

    @property
    def is_reported(self) -> bool:
        """Whether its kernels are those of the report, but for the number of kv heads."""
        group_size = self.query_head_count // self.kv_head_count
        return (group_size, self.block_size) == (QUERY_HEAD_COUNT // KV_HEAD_COUNT, BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """The pass that kernels are checked on.

    Attributes:
        layers: each is checked by itself.
        sharing_count: sequences that decode over one shared prefix.
        shared_token_count: tokens of it, whole splits.
        own_token_count: tokens of each behind it, at most.
        chunk: new tokens and context of a chunk that is split.
        long_chunk: likewise of one that is not.
        split_token_count: positions per split.
        long_query_row_count: rows from which a chunk is not split.
        window_token_count: of kinds with all options.
        process_count: processes that compile and check at once.
    """

    layers: tuple[CheckedLayer, ...]
    sharing_count: int
    shared_token_count: int
    own_token_count: int
    chunk: tuple[int, int]
    long_chunk: tuple[int, int]
    split_token_count: int
    long_query_row_count: int
    window_token_count: int
    process_count: int


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One pass of decode; ``target`` is of the share of copy bandwidth, None without one."""

    sequence_count: int
    context_token_count: int
    target: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """One layer of attention by itself.

    Attributes:
        geometry: of the layer.
        decode: passes without anything shared.
        eight_bit: the pass of decode to measure with 8-bit KV, too.
        sharing_count, shared_token_count, own_token_count: a pass of decode over a shared prefix.
        prefill: new tokens and context of single chunks; the first one has the target.
        copied_byte_count: of one copy, read and written apart.
        matmul_width: rows and columns of the square matrices.
        repeat_count: measurements per figure.
    """

    geometry: Geometry
    decode: tuple[DecodeCase, ...]
    eight_bit: DecodeCase
    sharing_count: int
    shared_token_count: int
    own_token_count: int
    prefill: tuple[tuple[int, int], ...]
    copied_byte_count: int
    matmul_width: int
    repeat_count: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A random Llama, and what is asked of it.

    Attributes:
        layer_count, hidden_size, intermediate_size, query_head_count, kv_head_count, head_width,
            vocabulary_size: of the model.
        dtype: of its weights and KV.
        shared_token_counts: prefixes that are cached once.
        own_token_count: tokens behind them.
        chunk_token_count: tokens per pass of prefill.
        decode_counts: sequences of a step of decode.
        decode_context_token_count: tokens of each of them.
        cold_repeat_count, warm_repeat_count, step_repeat_count: measurements per figure.
    """

    layer_count: int
    hidden_size: int
    intermediate_size: int
    query_head_count: int
    kv_head_count: int
    head_width: int
    vocabulary_size: int
    dtype: torch.dtype
    shared_token_counts: tuple[int, ...]
    own_token_count: int
    chunk_token_count: int
    decode_counts: tuple[int, ...]
    decode_context_token_count: int
    cold_repeat_count: int
    warm_repeat_count: int
    step_repeat_count: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """All sizes of one run."""

    checks: CheckSizes
    attention: AttentionSizes
    model: ModelSizes


def full_sizes() -> Sizes:
    """Large enough to fill a GPU, small enough for five minutes."""
    target = 0.7
    return Sizes(
        CheckSizes(
            layers=(*map(CheckedLayer, default_kinds()), *_other_shapes()),
            sharing_count=12,
            shared_token_count=2 * SPLIT_TOKEN_COUNT,
            own_token_count=100,
            chunk=(40, 700),
            long_chunk=(300, 1200),
            split_token_count=SPLIT_TOKEN_COUNT,
            long_query_row_count=LONG_QUERY_ROW_COUNT,
            window_token_count=128,
            process_count=8,
        ),
        AttentionSizes(
            geometry=Geometry(32, 8, 128, 128, torch.bfloat16),
            decode=(
                # Small passes end before the device is full: they have no target.
                DecodeCase(1, 32_768),
                DecodeCase(8, 8_192),
                DecodeCase(64, 2_048, target),
                DecodeCase(64, 8_192, target),
                DecodeCase(256, 2_048, target),
                DecodeCase(256, 8_192, target),
            ),
            eight_bit=DecodeCase(64, 8_192),
            sharing_count=64,
            shared_token_count=8_192,
            own_token_count=16,
            prefill=((8_192, 8_192), (2_048, 8_192), (16_384, 16_384)),
            copied_byte_count=4 * 1024**3,
            matmul_width=8_192,
            repeat_count=20,
        ),
        ModelSizes(
            layer_count=16,
            hidden_size=2_048,
            intermediate_size=8_192,
            query_head_count=32,
            kv_head_count=8,
            head_width=64,
            vocabulary_size=128_256,
            dtype=torch.bfloat16,
            shared_token_counts=(1_024, 2_048, 4_096, 8_192, 16_384, 32_768),
            own_token_count=64,
            chunk_token_count=8_192,
            decode_counts=(1, 8, 64),
            decode_context_token_count=2_048,
            cold_repeat_count=3,
            warm_repeat_count=10,
            step_repeat_count=20,
        ),
    )


def tiny_sizes() -> Sizes:
    """The same parts in triton's interpreter, in seconds; their figures say nothing.

    The interpreter computes bfloat16 and e4m3 wrongly, so neither is among the kinds.
    """
    float32, float16 = torch.float32, torch.float16
    return Sizes(
        CheckSizes(
            layers=(
                CheckedLayer(LayerKind(16, 16, float32, float32), 4, 1),
                CheckedLayer(LayerKind(24, 16, float32, torch.int8, has_all_options=True), 4, 1),
                CheckedLayer(LayerKind(16, 16, float16, float16), 3, 1, block_size=5),
            ),
            sharing_count=12,
            shared_token_count=32,
            own_token_count=8,
            chunk=(5, 20),
            long_chunk=(9, 40),
            split_token_count=16,
            long_query_row_count=8,
            window_token_count=20,
            process_count=1,
        ),
        AttentionSizes(
            geometry=Geometry(2, 1, 16, 16, float32),
            decode=(DecodeCase(2, 40, 0.7),),
            eight_bit=DecodeCase(2, 40),
            sharing_count=2,
            shared_token_count=512,
            own_token_count=1,
            prefill=((24, 24), (8, 24)),
            copied_byte_count=4_096,
            matmul_width=16,
            repeat_count=1,
        ),
        ModelSizes(
            layer_count=2,
            hidden_size=32,
            intermediate_size=32,
            query_head_count=2,
            kv_head_count=1,
            head_width=16,
            vocabulary_size=64,
            dtype=float32,
            shared_token_counts=(32,),
            own_token_count=4,
            chunk_token_count=24,
            decode_counts=(1, 2),
            decode_context_token_count=20,
            cold_repeat_count=1,
            warm_repeat_count=1,
            step_repeat_count=1,
        ),
    )


def _other_shapes() -> tuple[CheckedLayer, ...]:
    """Query heads per kv head and block sizes that make kernels of their own."""
    kind = LayerKind(64, 64, torch.bfloat16, torch.bfloat16)
    heads = ((8, 8), (9, 3), (32, 1))
    return (
        *(CheckedLayer(kind, *counts) for counts in heads),
        *(CheckedLayer(kind, block_size=block_size) for block_size in (5, 64, 256)),
    )
