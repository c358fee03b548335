from __future__ import annotations

import pytest
import torch

from prefixd.kernels import copy_blocks, reference

BLOCK_SIZE = 4


def check(pool: torch.Tensor, copies: list[tuple[int, int, int]]) -> torch.Tensor:
    """Kernel and twin leave the same bits; returns the kernel's pool."""
    sources, targets, counts = (torch.tensor(column) for column in zip(*copies, strict=True))
    results = []
    for copy in (copy_blocks.copy_blocks, reference.copy_blocks):
        results.append(pool.clone())
        copy(
            results[-1],
            source_block_ids=sources,
            target_block_ids=targets,
            token_counts=counts,
            block_size=BLOCK_SIZE,
        )
    assert torch.equal(results[1].view(torch.uint8), results[0].view(torch.uint8))
    return results[0]


@pytest.mark.parametrize("token_count", [1, BLOCK_SIZE - 1, BLOCK_SIZE])
def test_only_the_first_tokens_are_copied(token_count: int) -> None:
    """The rest of the target and every other block keep what they held."""
    pool = torch.arange(7 * BLOCK_SIZE * 6, dtype=torch.float32).view(7 * BLOCK_SIZE, 2, 3)
    result = check(pool, [(2, 5, token_count)])
    expected = pool.clone()
    expected[20 : 20 + token_count] = pool[8 : 8 + token_count]
    assert torch.equal(expected, result)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 16), (torch.float16, 5), (torch.int8, 3), (torch.float8_e4m3fn, 400)],
)
def test_any_dtype_and_width(dtype: torch.dtype, width: int) -> None:
    """Units of 8 bytes down to 1, and more units than one program moves."""
    pool = torch.randn(5 * BLOCK_SIZE, 3, width).to(dtype)
    check(pool, [(1, 2, 3), (1, 4, 4)])


def test_scales_are_copied_like_elements() -> None:
    """A pool tensor may have any number of axes behind the slots."""
    check(torch.randn(5 * BLOCK_SIZE, 3), [(3, 2, 2)])
