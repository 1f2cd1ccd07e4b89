"""A Triton kernel that adds gradients. Only a sum of CUDA tensors imports this file."""

from __future__ import annotations

from ctypes import c_float

import triton
import triton.language as tl
from triton.language import constexpr

import torch


def add_rows(rows: torch.Tensor, output: torch.Tensor, divisor: float | None) -> None:
    """Does as ``add_in_tree``: reads each row once, and writes only ``output``."""
    (count, numel), block_numel = rows.size(), 1024
    # On CUDA `div_` multiplies by the inverse of the number as fp32 has it
    scale = 1.0 / c_float(divisor or 1.0).value
    args = rows, output, numel, rows.stride(0), scale, count, block_numel
    # Without a value for fusion, Triton warns that the default will change
    _add_rows[(triton.cdiv(numel, block_numel),)](*args, enable_fp_fusion=False)


@triton.jit
def _add_rows(rows, output, numel, stride, scale, COUNT: constexpr, BLOCK: constexpr):
    """Adds a block of columns."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < numel
    stride = tl.cast(stride, tl.int64)  # rows may begin beyond 2^31 elements
    dtype: constexpr = output.dtype.element_ty
    total = _load_sum(rows + columns, stride, mask, COUNT, dtype)
    tl.store(output + columns, (total * scale).to(dtype), mask=mask)


@triton.jit
def _load_sum(rows, stride, mask, COUNT: constexpr, dtype: constexpr):
    """Adds the first ``COUNT`` rows in fp32, with sums rounded to ``dtype`` as by torch."""
    LEFT: constexpr = triton.next_power_of_2(COUNT) // 2
    if COUNT == 1:
        total = tl.load(rows, mask=mask)
    elif COUNT == 2 * LEFT and COUNT > 8:
        # Loops compile in a second, the code of a thousand rows would take minutes.
        # x + -0.0 has the bits of x
        total = tl.full(mask.shape, -0.0, dtype)
        for i in range(2):
            half = _load_sum(rows + i * LEFT * stride, stride, mask, LEFT, dtype)
            total = (total.to(tl.float32) + half).to(dtype)
    else:
        total = _load_sum(rows, stride, mask, LEFT, dtype)
        total += _load_sum(rows + LEFT * stride, stride, mask, COUNT - LEFT, dtype)
    return total.to(dtype).to(tl.float32)
