"""
Multiplies half-precision matrices in fp32 on CPUs that have no instructions for them.

[Note: how half matrices are multiplied]
An x86 CPU without AVX512 multiplies bf16 and fp16 matrices one element at a time, 30 to
150 times slower than fp32 ones. There :func:`widen_half_products` makes ``mm``,
``bmm``, ``addmm`` and ``baddbmm`` do what hardware does: convert the factors to fp32,
which is exact, add the products up in fp32, and round once. Only the order of the
additions differs from another CPU's kernel.
"""

import functools
import platform
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# What it registers lasts as long as it does
_LIBRARY = torch.library.Library("aten", "IMPL")


def slow_dtypes() -> frozenset[torch.dtype]:
    """The dtypes that this CPU has no instructions to multiply matrices of."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return frozenset({torch.bfloat16, torch.float16})
    if not torch.cpu.get_capabilities().get("avx512_fp16"):
        return frozenset({torch.float16})
    return frozenset()


@functools.cache  # once in a process
def widen_half_products() -> None:
    """Changes kernels of the process. See [Note: how half matrices are multiplied]."""
    if not (widened := slow_dtypes()):
        return
    kernels = {n: torch.library.get_kernel(f"aten::{n}", "CPU") for n in PRODUCTS}
    with warnings.catch_warnings():
        # That a kernel is replaced is what is wanted here
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in kernels.items():
            _LIBRARY.impl(name, _in_fp32(kernel, widened), "CPU", with_keyset=True)


def _in_fp32(kernel: Any, widened: frozenset[torch.dtype]) -> Callable[..., Tensor]:
    def call(keys: Any, *factors: Tensor, **scalars: Any) -> Tensor:
        dtype = factors[0].dtype
        # Factors of several dtypes are an error, which the kernel raises itself
        if dtype not in widened or any(f.dtype != dtype for f in factors):
            return kernel.call_boxed(keys, *factors, **scalars)
        wide = [factor.float() for factor in factors]
        return kernel.call_boxed(keys, *wide, **scalars).to(dtype)

    return call
