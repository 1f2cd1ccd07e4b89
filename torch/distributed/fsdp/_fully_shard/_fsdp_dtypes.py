"""What the dtypes of a parameter are: stored, computed with, reduced and sent in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._fsdp_layout import BucketKey, reduce_dtype_of
from ._fsdp_param import FSDPParam
from ._fsdp_release import FOLLOWS_GRAD_DTYPE


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter, those that a policy does not touch included."""

    stored: torch.dtype
    compute: torch.dtype
    # Of a gradient in the compute dtype, as autograd makes it
    reduce: torch.dtype
    grad: torch.dtype
    # What is sent to be reduced, None if what it is reduced in
    comm: torch.dtype | None


def dtypes_of(fsdp_param: FSDPParam) -> ParamDtypes:
    """Returns a parameter's dtypes as they are now, before lazy init as well."""
    policy, param = fsdp_param.mp_policy, fsdp_param.sharded_param
    compute = param.dtype
    if policy.param_dtype is not None and compute.is_floating_point:
        compute = policy.param_dtype
    reduce = reduce_dtype_of(compute, default_reduce_dtype(fsdp_param))
    _, comm = bucket_key(fsdp_param, reduce)
    return ParamDtypes(param.dtype, compute, reduce, param.grad_dtype or reduce, comm)


def is_mixed(fsdp_params: Sequence[FSDPParam]) -> bool:
    """Whether the trained parameters of a unit differ in any of these."""
    trained = [p for p in fsdp_params if p.sharded_param.requires_grad]
    described = [dtypes_of(fsdp_param) for fsdp_param in trained]
    return any(dtypes != described[0] for dtypes in described)


def default_reduce_dtype(fsdp_param: FSDPParam) -> torch.dtype | None:
    """Returns what a parameter's gradient is reduced in, None for its own dtype."""
    dtype = fsdp_param.mp_policy.reduce_dtype
    if dtype is None and FOLLOWS_GRAD_DTYPE:
        return fsdp_param.sharded_param.grad_dtype
    return dtype


def bucket_key(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> BucketKey:
    """Returns what a gradient is reduced and sent in."""
    if not reduce_dtype.is_floating_point:
        return reduce_dtype, None  # see `reduce_dtype_of`
    # Users may have a policy class of their own
    return reduce_dtype, getattr(fsdp_param.mp_policy, "grad_comm_dtype", None)


def accumulation_dtype(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> torch.dtype:
    """
    Returns what the gradients of microbatches are added in until they are reduced over
    all ranks: a wider ``grad_dtype`` that users have set, else what they are reduced in.
    """
    param = fsdp_param.sharded_param
    dtype = param.grad_dtype
    if dtype is None or dtype == param.dtype or not reduce_dtype.is_floating_point:
        return reduce_dtype
    return dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype
