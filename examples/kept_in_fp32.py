"""Which parameters a model of ``transformers`` or ``diffusers`` keeps in fp32.

Both libraries say so in the model's class, and follow it when they load a checkpoint in
16 bits. Whoever builds a model otherwise, or trains it from fp32 weights, asks here:

    policy = MixedPrecisionPolicy.by_name(
        model, fp32_policies(model), param_dtype=torch.bfloat16
    )

This file needs nothing but torch, and may be copied.
"""

import glob
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


HALVES = (torch.float16, torch.bfloat16)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Returns the names of the parameters that stay fp32 in a model of ``dtype``.

    In ``transformers`` (5.23), ``_keep_in_fp32_modules_strict`` lists regular
    expressions, which may match anywhere in a name, for bf16 and fp16, and
    ``_keep_in_fp32_modules`` such for fp16 alone. In ``diffusers`` (0.42) there is
    only the latter, for both: components of names, whole ones.

    Args:
        model: As its library makes it. What wraps it changes names, and so what fits.
        dtype: bf16 or fp16; of any other, nothing is kept.
    """
    if dtype not in HALVES:
        return []
    names = [name for name, _ in model.named_parameters()]
    if not hasattr(model, "_keep_in_fp32_modules_strict"):
        components = _listed(model, "_keep_in_fp32_modules")
        return [name for name in names if components & {*name.split(".")}]
    expressions = _listed(model, "_keep_in_fp32_modules_strict")
    if dtype is torch.float16:
        expressions |= _listed(model, "_keep_in_fp32_modules")
    fits = [re.compile(each.replace("*", ".*")) for each in sorted(expressions)]
    return [name for name in names if any(fit.search(name) for fit in fits)]


def _listed(model: nn.Module, attribute: str) -> set[str]:
    listed: Any = getattr(model, attribute, None)
    return set(listed or ())


def fp32_policies(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> dict[str, MixedPrecisionPolicy]:
    """Returns what ``MixedPrecisionPolicy.by_name`` takes: fp32 for those of them."""
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return {glob.escape(name): fp32 for name in kept_in_fp32(model, dtype)}
