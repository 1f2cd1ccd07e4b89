"""
What errors say of the parameter that they are about, and what to do.

[Note: Looked at when it fails]
A step has no time to check all that it is given, and most of what is wrong makes it
fail anyway. Only then is it looked at, for an error of the same type that names the
parameter. Where nothing is known about an error, it is left as it is.
"""

# Tests: bad_input
from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._fsdp_layout import ReduceBucket
from ._fsdp_param import FSDPParam
from ._fsdp_policies import REDUCIBLE


_PINNING_ADVICE = "Without an accelerator use CPUOffloadPolicy(pin_memory=False)"
_PLACEMENT_ADVICE = (
    "shard_placement_fn must return Shard of a dim that it has, which must divide by "
    "the ranks unless it is dim 0"
)


def _keeps_error(explain: Callable[..., str | None]) -> Callable[..., Exception]:
    """Makes a function that returns a message return an error of that type with it."""

    @functools.wraps(explain)
    def explain_error(error: Exception, /, *args: Any) -> Exception:
        if type(error).__module__ != "builtins" or len(error.args) > 1:
            return error  # it is made of more than a message
        with contextlib.suppress(Exception):
            if (message := explain(error, *args)) is not None:
                explained = type(error)(message)
                explained.__cause__ = error
                return explained
        return error

    return explain_error


def listed(texts: Sequence[str], separator: str = ", ", limit: int = 8) -> str:
    """Joins the first of some texts, and says how many more there are."""
    more = [f"and {len(texts) - limit} more"] if len(texts) > limit else []
    return separator.join([*texts[:limit], *more])


def warn_user(message: str) -> None:
    """Warns at the line outside of torch that has led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] == "torch":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _names(*fsdp_params: FSDPParam) -> str:
    return listed([p._param_fqn or p._module_info.param_name for p in fsdp_params])


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_of_pinning(error: Exception) -> bool:
    """Whether memory cannot be pinned here, and ``error`` says so."""
    try:
        torch.empty(1).pin_memory()
    except Exception as own:
        # In front of stacks of C++, if these are shown
        return str(own).splitlines()[:1] == str(error).splitlines()[:1]
    return False


@_keeps_error
def explain_sharding(
    error: Exception, param: nn.Parameter, name: str, is_placed: bool
) -> str:
    if param.layout != torch.strided or param.is_quantized:
        fix = "Call to_dense() or dequantize() on it first, or put it in ignored_params"
    elif _is_of_pinning(error):
        fix = _PINNING_ADVICE
    elif "uneven sharding on dim" in str(error) or "Shard dim" in str(error):
        fix = _PLACEMENT_ADVICE  # also of a DTensor
    elif isinstance(param, DTensor) and "non-contiguous" not in str(error):
        fix = (
            "It is a DTensor already. If its module's parent was sharded first, call "
            "fully_shard on children before their parents. If tensor parallelism made "
            "it one, use meshes with named dims apart, or name FSDP's in dp_mesh_dims"
        )
    elif type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        fix = (
            f"Its class, {type(param).__name__}, must implement fsdp_pre_all_gather, "
            "fsdp_post_all_gather and the operators split, new_zeros, slice, copy_, "
            "view, as_strided and detach. Dequantize it first, or put it in "
            "ignored_params"
        )
    elif not param.is_contiguous():
        fix = "Make it contiguous first: nn.Parameter(param.detach().contiguous())"
    elif is_placed:  # by a user's `shard_placement_fn`
        fix = _PLACEMENT_ADVICE
    else:
        fix = "Fix it, or put it in ignored_params"
    # Of a mesh without names, the release says only that a value is None
    tail = "" if str(error).startswith("Invariant encountered") else f": {error}"
    return f"Parameter {name} cannot be sharded. {fix}{tail}"


def check_param(fsdp_param: FSDPParam, name: str) -> None:
    """Raises if a parameter that was just sharded, or loaded, cannot be trained."""
    if (wrong := _find_wrong_registration(fsdp_param, name)) is not None:
        raise RuntimeError(wrong)
    smaller, dim = fsdp_param.post_forward_mesh_info, fsdp_param.fsdp_placement.dim
    if smaller is not None and smaller != fsdp_param.mesh_info and dim != 0:
        size, ranks = tuple(fsdp_param._orig_size), smaller.shard_mesh_size
        if size[0] % ranks != 0:
            raise ValueError(
                f"{name} of size {size} is sharded on dim {dim}, but resharding it to "
                f"{ranks} ranks after forward cuts dim 0: let reshard_after_forward be "
                "True or False, or a factor of that dim"
            )
    param = fsdp_param.sharded_param
    grad_dtype = param.grad_dtype if param.requires_grad else None
    if grad_dtype is not None and not _has_fractions(grad_dtype):
        raise ValueError(
            f"grad_dtype of {name} is {grad_dtype}, which has no fractions: set a "
            "floating-point dtype, or leave it as it was"
        )


@_keeps_error
def explain_registered(error: Exception, fsdp_param: FSDPParam, name: str) -> str:
    fix = f". {_PINNING_ADVICE}" if _is_of_pinning(error) else ""
    unknown = f"{name} cannot be taken as it is registered{fix}: {error}"
    return _find_wrong_registration(fsdp_param, name) or unknown


def _find_wrong_registration(fsdp_param: FSDPParam, name: str) -> str | None:
    """Returns what is wrong with what a module has under a parameter's name, if any."""
    info = fsdp_param._module_info
    found = getattr(info.module, info.param_name, None)
    if found is None:
        return f"{name} is gone. Put it back, or delete it before fully_shard"
    if not isinstance(found, DTensor):
        return (
            f"{name} must be the DTensor that fully_shard made of it, but it is a "
            f"{type(found).__name__}. Replace it before fully_shard, or copy into it. "
            "Load a full state dict with set_model_state_dict(..., "
            "options=StateDictOptions(full_state_dict=True))"
        )
    if not found.is_leaf:
        return (
            f"{name} is computed from other tensors and can get no gradient. "
            "Parametrize it before fully_shard, and run a first forward before a "
            "functional_call"
        )
    dtype = found._local_tensor.dtype
    if type(found._local_tensor) is torch.Tensor and dtype != found.dtype:
        return (
            f"{name} is {found.dtype} now, but its shard is {dtype}, as only its data "
            "was set. Cast by module.to(dtype), before the first forward"
        )
    spec = fsdp_param._unsharded_dtensor_spec
    size = fsdp_param._orig_size if spec is None else spec.shape
    shard_size, found_size = fsdp_param.sharded_size, found._local_tensor.size()
    # A shard without elements may have any shape
    is_empty = shard_size.numel() == found_size.numel() == 0
    if found.size() == size and (found_size == shard_size or is_empty):
        return None
    return (
        f"{name} is a DTensor of size {tuple(found.size())} ({tuple(found_size)} on "
        f"this rank), but was sharded as {tuple(size)} ({tuple(shard_size)}). Change "
        "its size before fully_shard, and load what is sharded alike"
    )


@_keeps_error
def explain_extension(error: Exception, fsdp_param: FSDPParam, hook: str) -> str | None:
    name = _names(fsdp_param)
    if not hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return None
    if not hasattr(fsdp_param, "_extensions_data"):
        return (
            f"{name} was sharded as a plain tensor, but has fsdp_pre_all_gather now: "
            "replace it before the first forward"
        )
    returns = "((contiguous tensor, ...), metadata)"
    if hook == "fsdp_post_all_gather":
        returns = "(tensor, (tensor to free, ...))"
    return f"{hook} of {name} failed, or did not return {returns}: {error}"


@_keeps_error
def explain_all_to_all(
    error: Exception, parts: Sequence[Any], device: torch.device
) -> str:
    fsdp_params = chain.from_iterable(part.fsdp_params for part in parts)
    dtypes = dict.fromkeys(str(part.bucket.wire_dtype) for part in parts)
    return (
        f"The gradients of {_names(*fsdp_params)} are sent in {' and '.join(dtypes)} "
        "(grad_comm_dtype) by all_to_all_single, which failed. If the backend lacks it "
        f"for {device.type}, use another one or leave grad_comm_dtype out: {error}"
    )


@_keeps_error
def explain_reduction(
    error: Exception,
    fsdp_params: Sequence[FSDPParam],
    bucket: ReduceBucket,
    grads: Sequence[torch.Tensor],
    device: torch.device,
) -> str | None:
    """``grads`` are those of the first parameters, which have not been copied in."""
    for fsdp_param, grad in zip(fsdp_params, grads):
        about = f"The gradient of {_names(fsdp_param)}"
        size, found_size = tuple(fsdp_param._orig_size), tuple(grad.size())
        if grad.layout != torch.strided:
            return (
                f"{about} is sparse ({grad.layout}), and only dense ones are reduced. "
                "Use nn.Embedding(sparse=False), or put the parameter in ignored_params"
            )
        if isinstance(grad, DTensor):
            return f"{about} is a DTensor: set its to_local() or full_tensor() instead"
        if found_size != size:
            return (
                f"{about} has size {found_size}, but the parameter has size {size}. "
                "Look for a hook that resizes it or sets its data"
            )
    if bucket.dtype not in REDUCIBLE and not bucket.dtype.is_complex:
        return (
            f"The gradients of {_names(*fsdp_params)} cannot be averaged in "
            f"{bucket.dtype} on {device}. Set reduce_dtype to torch.float32: {error}"
        )
    for fsdp_param, slot in zip(fsdp_params, bucket.slots):
        grad_dtype, name = slot.grad_dtype or bucket.dtype, _names(fsdp_param)
        param, size = fsdp_param.sharded_param, fsdp_param.sharded_size
        if param.grad is None and param.grad_dtype not in (None, grad_dtype):
            return (
                f"{name} is {param.dtype} now, but its gradients are {grad_dtype}: "
                "cast a model before its first forward, not between steps"
            )
        grad = getattr(param.grad, "_local_tensor", None)
        if grad is not None and (not _has_fractions(grad.dtype) or grad.size() != size):
            return (
                f"The gradient that {name} has is {grad.dtype} of size "
                f"{tuple(grad.size())} here, to which one of {grad_dtype} and "
                f"{tuple(size)} cannot be added. Set None, or one that is sharded like "
                "the parameter"
            )
    return None
