"""The paged K and V of one layer, as the kernels see them."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
"""The 8-bit float of KV: four exponent and three mantissa bits, no infinities."""

QUANTIZED_MAXIMA = {torch.int8: 127.0, FP8_DTYPE: 448.0}
"""The largest magnitude of each 8-bit format: what a head's largest element is scaled to."""

AMAX_MIN = 2.0**-100
"""A head whose largest magnitude is below this is stored as zeros: its scale would be subnormal."""


FP8_CAPABILITY_MIN = (8, 9)
"""The first compute capability that converts e4m3 numbers."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's pool; slot = block_id * block_size + offset.

    Invariants: all tensors are on one device; elements of one head are contiguous; scales are there
    exactly where elements take 8 bits.

    Attributes:
        keys: (slots, kv heads, key width).
        values: (slots, kv heads, value width), of the same dtype.
        key_scales: float32 (slots, kv heads): an element is its stored number times its scale;
            None for floats of 16 or 32 bits.
        value_scales: likewise for values.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.keys.dim() == self.values.dim() == 3, (self.keys.shape, self.values.shape)
        assert self.keys.shape[:2] == self.values.shape[:2], (self.keys.shape, self.values.shape)
        assert self.keys.dtype == self.values.dtype, (self.keys.dtype, self.values.dtype)
        assert self.keys.device == self.values.device, (self.keys.device, self.values.device)
        assert self.keys.stride(2) == self.values.stride(2) == 1, "elements of a head are adjacent"
        for scales in (self.key_scales, self.value_scales):
            assert (scales is not None) == self.is_quantized, f"{self.keys.dtype} and its scales"
            if scales is not None:
                assert scales.shape == self.keys.shape[:2], (scales.shape, self.keys.shape)
                assert scales.dtype == torch.float32, scales.dtype
                assert scales.device == self.keys.device, (scales.device, self.keys.device)
                assert scales.is_contiguous(), "scales are contiguous"

    @property
    def is_quantized(self) -> bool:
        """Whether elements take 8 bits and have scales."""
        return self.keys.dtype in QUANTIZED_MAXIMA

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a token's slot has a row of: K, V, and scales where there are any."""
        scales = (self.key_scales, self.value_scales)
        return (self.keys, self.values, *(tensor for tensor in scales if tensor is not None))

    @property
    def slot_count(self) -> int:
        """Slots of the pool, block 0 included."""
        return self.keys.shape[0]

    @property
    def head_count(self) -> int:
        """KV heads."""
        return self.keys.shape[1]

    @property
    def key_width(self) -> int:
        """Elements of K per head."""
        return self.keys.shape[2]

    @property
    def value_width(self) -> int:
        """Elements of V per head."""
        return self.values.shape[2]


def fp8_refusal(capability: tuple[int, int]) -> str | None:
    """Why a GPU of a compute capability cannot have e4m3 pools, or None where it can."""
    if capability >= FP8_CAPABILITY_MIN:
        return None
    needed, found = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY_MIN, capability))
    return f"e4m3 conversions need compute capability {needed}, this GPU has {found}"


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in an 8-bit format.

    Attributes:
        elements: (rows, heads, width), int8 or e4m3.
        scales: float32 (rows, heads).
    """

    elements: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """The rows as float32."""
        return self.elements.float() * self.scales[..., None]


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Scales each head of each row so that its largest magnitude becomes the format's.

    One scale per (token, head), so that a stored token is a function of that token alone: with a
    scale per block, a block's bytes would depend on how its prefill was cut into chunks.

    A head with an infinity or NaN in it becomes zeros with an infinite scale, which read as NaN.

    Args:
        rows: (rows, heads, width), floats.
        dtype: a key of QUANTIZED_MAXIMA.
    """
    rows = rows.float()
    amax = rows.abs().amax(dim=-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    scales = torch.where(amax >= AMAX_MIN, amax / QUANTIZED_MAXIMA[dtype], 1.0)
    scaled = (rows / scales[..., None]).masked_fill_(amax.isinf()[..., None], 0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    return QuantizedRows(scaled.to(dtype), scales)


def as_movable(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that torch moves on every device: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8_DTYPE else tensor


def dequantize(elements: Tensor, scales: Tensor | None) -> Tensor:
    """Elements (..., width) and their scales (...) as float32."""
    return elements.float() if scales is None else elements.float() * scales[..., None]


def dequantize_into(target: Tensor, elements: Tensor, scales: Tensor) -> None:
    """Writes 8-bit elements (..., width) times their scales (...) to contiguous floats.

    ``target`` holds what `dequantize` gives, rounded once to its dtype.
    """
    if elements.dtype == FP8_DTYPE:
        # A table of all numbers: torch's own conversion on the CPU takes five times as long.
        numbers = torch.arange(256, dtype=torch.uint8, device=elements.device).view(FP8_DTYPE)
        places = elements.view(torch.uint8).int().flatten()
        torch.index_select(numbers.to(target.dtype), 0, places, out=target.view(-1))
    else:
        target.copy_(elements)
    target.mul_(scales[..., None])
