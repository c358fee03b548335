"""Repairs of the Triton interpreter's arithmetic, for tests.

The interpreter keeps bfloat16 and 8-bit floats as integers holding their bits. Out of the box it
multiplies those bits in `dot`, truncates float32 to bfloat16, loses carries and NaN on the way to
8-bit floats, and turns an int8 into a bfloat16 with those bits. Here casts go through torch,
products are summed in float64, and arithmetic on bits is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_BITS = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
_STORAGE = {2: torch.int16, 1: torch.uint8}


def repair(patch: pytest.MonkeyPatch) -> None:
    """Repair the interpreter until the patch is undone."""
    builder = interpreter.InterpreterBuilder
    original_binary = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        for side in (lhs, rhs):
            assert side.dtype.scalar not in _BITS, f"{op.__name__} on the bits of {side.dtype}"
        return original_binary(self, lhs, rhs, op)

    def cast(self: Any, source: Any, target: Any, *_: Any) -> Any:
        data = _to_numpy(_to_torch(source).to(_torch_dtype(target.scalar)), target.scalar)
        return interpreter.TensorHandle(data, target.scalar)

    def dot(self: Any, left: Any, right: Any, start: Any, *_: Any) -> Any:
        product = _to_torch(left).double() @ _to_torch(right).double()
        return interpreter.TensorHandle(
            product.numpy().astype(start.data.dtype) + start.data, start.dtype.scalar
        )

    patch.setattr(builder, "binary_op", binary_op)
    patch.setattr(builder, "cast_impl", cast)
    patch.setattr(builder, "create_fp_to_fp", cast)
    patch.setattr(builder, "create_dot", dot)


def _to_torch(handle: Any) -> torch.Tensor:
    data = np.ascontiguousarray(handle.data)
    dtype = handle.dtype.scalar
    if dtype not in _BITS:
        return torch.from_numpy(data)
    storage = _STORAGE[data.itemsize]
    signed = data.view(np.int16) if storage == torch.int16 else data
    return torch.from_numpy(signed).view(_BITS[dtype])


def _to_numpy(tensor: torch.Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    if dtype not in _BITS:
        return tensor.numpy()
    bits = tensor.view(_STORAGE[tensor.element_size()]).numpy()
    return bits.view(np.uint16) if bits.itemsize == 2 else bits


def _torch_dtype(dtype: Any) -> torch.dtype:
    if dtype in _BITS:
        return _BITS[dtype]
    return torch.from_numpy(np.zeros(1, interpreter._get_np_dtype(dtype))).dtype
