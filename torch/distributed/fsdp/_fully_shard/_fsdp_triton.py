"""A Triton kernel that adds gradients. Only a sum of CUDA tensors imports this file."""

from __future__ import annotations

from ctypes import c_float

import triton
import triton.language as tl
from triton.language import constexpr

import torch


_BLOCK_NUMEL = 1024


def add_rows(rows: torch.Tensor, output: torch.Tensor, divisor: float | None) -> None:
    """Does as ``add_in_tree``: reads each row once, and writes only ``output``."""
    count, numel = rows.size()
    # On CUDA `div_` multiplies by the inverse of the number as fp32 has it
    scale = 1.0 / c_float(divisor or 1.0).value
    # Without a value for fusion, Triton warns that the default will change
    _add_rows[(triton.cdiv(numel, _BLOCK_NUMEL),)](
        rows, output, numel, rows.stride(0), scale, count, _BLOCK_NUMEL,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _add_rows(rows, output, numel, stride, scale, COUNT: constexpr, BLOCK: constexpr):
    """Adds a block of columns."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < numel
    stride = tl.cast(stride, tl.int64)  # rows may begin beyond 2^31 elements
    dtype: constexpr = output.dtype.element_ty
    total = _load_sum(rows + columns, stride, mask, COUNT, dtype)
    scaled = (total.to(tl.float32) * scale).to(dtype)
    tl.store(output + columns, scaled, mask=mask)


@triton.jit
def _load_sum(rows, stride, mask, COUNT: constexpr, dtype: constexpr):
    """Adds the first ``COUNT`` rows."""
    LEFT: constexpr = triton.next_power_of_2(COUNT) // 2
    if COUNT == 1:
        total = tl.load(rows, mask=mask).to(dtype)
    elif COUNT == 2 * LEFT and COUNT > 8:
        # Loops compile in a second, the code of a thousand rows would take minutes.
        # x + -0.0 has the bits of x
        total = tl.full(mask.shape, -0.0, dtype)
        for i in range(2):
            half = _load_sum(rows + i * LEFT * stride, stride, mask, LEFT, dtype)
            total = _add(total, half, dtype)
    else:
        left = _load_sum(rows, stride, mask, LEFT, dtype)
        right = _load_sum(rows + LEFT * stride, stride, mask, COUNT - LEFT, dtype)
        total = _add(left, right, dtype)
    return total


@triton.jit
def _add(left, right, dtype: constexpr):
    """Adds in fp32, and rounds each sum to the dtype, as PyTorch does."""
    return (left.to(tl.float32) + right.to(tl.float32)).to(dtype)
