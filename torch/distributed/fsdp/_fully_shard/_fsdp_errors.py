"""
What errors say of the parameter that they are about, and what to do.

[Note: Looked at when it fails]
A step has no time to look at all that it is given, and most of what is wrong makes
something fail in it anyway. Only then is it looked for here. What is found names the
parameter and keeps the kind of the error, which others may catch. What is not found is
left as it is.

Of tensors with ``fsdp_pre_all_gather``, whose methods are the user's, nothing is left to
look at. There the traceback tells which parameter it was: it goes through a method of it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._fsdp_api import (
    AllGather,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from ._fsdp_doors import DescribedUnit, Errors, Sharding, Step, Taking
from ._fsdp_param import FSDPParam
from ._fsdp_policies import is_reducible
from ._fsdp_unit import GatherPlan, UnitBucket


# Kinds of errors that are made of one text. An exception of a user's may take
# more, and is passed on as it is.
_MADE_OF_TEXT = (
    AssertionError,
    AttributeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ExplainedErrors(Errors):
    """Says which parameter an error is about, and what to do."""

    def check_setting(self, setter: str, value: Any, unit: str) -> None:
        _SETTINGS[setter](value, unit)

    def check_param(self, fsdp_param: FSDPParam, name: str) -> None:
        if (wrong := _what_is_registered(fsdp_param, name)) is not None:
            raise RuntimeError(wrong)
        _check_reshards(fsdp_param, name)
        _check_grad_dtype(fsdp_param.sharded_param, name)

    def explain(self, error: Exception, at: Sharding | Taking | Step) -> Exception:
        if type(error) not in _MADE_OF_TEXT:
            return error
        if isinstance(at, Sharding):
            what_to_do = _how_to_shard(at.param, at.make_fsdp_param.keywords)
            text = f"Parameter {at.name} cannot be sharded. {what_to_do}"
        elif isinstance(at, Taking):
            text = _what_is_registered(at.fsdp_param, at.name)
            text = text or f"{at.name} cannot be taken as it is registered"
        elif at.failed is None:
            text = _about_gather(error)
        else:
            text = _about_reduction(error, at.unit, at.failed, at.grads)
        if text is None:
            return error
        # Of a mesh without names, the release says that a value is None
        says_nothing = str(error).startswith("Invariant encountered")
        explained = type(error)(text if says_nothing else f"{text}: {error}")
        explained.__cause__ = error
        return explained


# When a unit is made #


def _check_mp_policy(policy: Any, unit: str) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy of unit '{unit}' must be a MixedPrecisionPolicy, but it is "
            f"{policy!r}: pass MixedPrecisionPolicy(param_dtype=...), or leave it out"
        )


def _check_offload_policy(policy: Any, unit: str) -> None:
    # None has always meant not to offload
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy of unit '{unit}' must be an OffloadPolicy, but it is "
            f"{policy!r}, which would offload nothing: pass CPUOffloadPolicy(), or "
            "leave it out"
        )


def _how_to_shard(param: nn.Parameter, arguments: dict[str, Any]) -> str:
    """Returns what to do about a parameter that cannot be sharded with these."""
    if param.layout != torch.strided or param.is_quantized:
        return (
            "Only dense parameters can be: call to_dense() or dequantize() on it "
            "first, or put it in ignored_params"
        )
    if isinstance(param, DTensor):
        return (
            "It is a DTensor already: call fully_shard on children before their "
            "parents. If it is meant to be one, let its mesh and FSDP's have named "
            "dims that do not overlap, or name FSDP's in dp_mesh_dims"
        )
    if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"It is of the tensor subclass {type(param).__name__}, which can be sharded "
            "if it implements fsdp_pre_all_gather, fsdp_post_all_gather and the "
            "operators split, new_zeros, slice, copy_, view, as_strided and detach. "
            "Dequantize it first, or put it in ignored_params"
        )
    if not param.is_contiguous():
        return "Make it contiguous first: nn.Parameter(param.detach().contiguous())"
    offload = arguments["offload_policy"]
    is_pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
    if is_pinned and not torch.accelerator.is_available():
        return "Without an accelerator use CPUOffloadPolicy(pin_memory=False)"
    if arguments["shard_placement_fn"] is not None:
        return (
            "shard_placement_fn must return Shard of a dim that it has, which must "
            "divide by the ranks unless it is dim 0"
        )
    return "Mend it, or put it in ignored_params"


def _check_reshards(fsdp_param: FSDPParam, name: str) -> None:
    """Raises if a parameter cannot be resharded to a smaller mesh after forward."""
    smaller = fsdp_param.post_forward_mesh_info
    if smaller is None or smaller == fsdp_param.mesh_info:
        return
    ranks = smaller.shard_mesh_size
    dim, size = fsdp_param.fsdp_placement.dim, fsdp_param._orig_size
    if dim != 0 and size[0] % ranks != 0:
        raise ValueError(
            f"{name} of size {tuple(size)} is sharded on dim {dim}, and cannot be "
            f"resharded to {ranks} ranks after forward, which cuts dim 0: let "
            "reshard_after_forward be True or False, or a factor of that dim"
        )


def _check_grad_dtype(param: nn.Parameter, name: str) -> None:
    grad_dtype = param.grad_dtype
    if grad_dtype is None or not param.requires_grad:
        return
    if grad_dtype.is_floating_point or grad_dtype.is_complex:
        return
    raise ValueError(
        f"grad_dtype of {name} is {grad_dtype}, to which its gradients would be cut: "
        "set a floating-point dtype, or leave it as it was"
    )


# When settings are made #


def _check_all_gather(comm: Any, unit: str) -> None:
    _check_comm(comm, unit, "set_custom_all_gather", AllGather, ReduceScatter)


def _check_reduce_scatter(comm: Any, unit: str) -> None:
    _check_comm(comm, unit, "set_custom_reduce_scatter", ReduceScatter, AllGather)


def _check_comm(comm: Any, unit: str, setter: str, kind: type, other: type) -> None:
    is_object = not isinstance(comm, type) and callable(comm)
    is_other = isinstance(comm, other) and not isinstance(comm, kind)
    if is_object and callable(getattr(comm, "allocate", None)) and not is_other:
        return
    raise TypeError(
        f"{setter} of unit '{unit}' got {comm!r}: pass an object that has allocate "
        f"and __call__ as {kind.__name__} has them"
    )


def _check_all_reduce_hook(hook: Any, unit: str) -> None:
    if hook is not None and not callable(hook):
        raise TypeError(
            f"set_all_reduce_hook of unit '{unit}' got {hook!r}, which cannot be "
            "called: pass a function of the reduced buffer"
        )


def _check_divide_factor(factor: Any, unit: str) -> None:
    if factor is None:
        return
    setter = f"set_gradient_divide_factor of unit '{unit}'"
    is_number = isinstance(factor, numbers.Real)
    if not is_number and not (isinstance(factor, torch.Tensor) and factor.dim() == 0):
        raise TypeError(f"{setter} got {factor!r}: pass a number to divide by")
    if not math.isfinite(factor) or factor == 0:
        raise ValueError(
            f"{setter} got {factor!r}, by which gradients cannot be divided: pass a "
            "finite number other than 0"
        )


_SETTINGS: dict[str, Callable[[Any, str], None]] = {
    "mp_policy": _check_mp_policy,
    "offload_policy": _check_offload_policy,
    "set_custom_all_gather": _check_all_gather,
    "set_custom_reduce_scatter": _check_reduce_scatter,
    "set_all_reduce_hook": _check_all_reduce_hook,
    "set_gradient_divide_factor": _check_divide_factor,
}


# When parameters are taken as they are #


def _what_is_registered(fsdp_param: FSDPParam, name: str) -> str | None:
    """
    Returns what is wrong with what a module has under a parameter's name, None if
    nothing that can be seen.
    """
    info = fsdp_param._module_info
    found = getattr(info.module, info.param_name, None)
    if isinstance(found, DTensor) and not found.is_leaf:
        return (
            f"{name} is computed from other tensors, so that no gradient can be given "
            "to it. Parametrize it before fully_shard, and run a first forward before "
            "a functional_call"
        )
    if isinstance(found, DTensor):
        if not _has_other_size(fsdp_param, found):
            return None
        return (
            f"{name} is a DTensor of size {tuple(found.size())} and, on this rank, "
            f"{tuple(found._local_tensor.size())}, but it was sharded as "
            f"{tuple(_whole_size(fsdp_param))} and {tuple(fsdp_param.sharded_size)}. "
            "Change its size before fully_shard, and load what is sharded alike"
        )
    if found is None:
        return (
            f"{name} is gone, but it was sharded. Delete it before fully_shard, or "
            "put it back"
        )
    return (
        f"{name} must be the DTensor that fully_shard made of it, but it is a "
        f"{type(found).__name__}. Replace it before fully_shard, or copy into it. Load "
        "a full state dict with torch.distributed.checkpoint.state_dict."
        "set_model_state_dict(..., options=StateDictOptions(full_state_dict=True))"
    )


def _has_other_size(fsdp_param: FSDPParam, found: DTensor) -> bool:
    size, local_size = fsdp_param.sharded_size, found._local_tensor.size()
    if found.size() != _whole_size(fsdp_param):
        return True
    # Nothing has any shape
    return local_size != size and local_size.numel() + size.numel() > 0


def _whole_size(fsdp_param: FSDPParam) -> torch.Size:
    spec = fsdp_param._unsharded_dtensor_spec
    return fsdp_param._orig_size if spec is None else spec.shape


# In a step #

_AFTER = ("fsdp_post_all_gather", "(tensor, (tensor to free, ...))")
# What a user's tensor does in these functions, and what it must return
_OF_EXTENSIONS = {
    "all_gather_inputs": (
        "fsdp_pre_all_gather",
        "((contiguous tensor, ...), metadata)",
    ),
    "init_unsharded_param": _AFTER,
    "_check_unsharded": _AFTER,
}


def _about_gather(error: BaseException) -> str | None:
    """Returns which tensor's methods an error in a gather is about, if of any."""
    for code, local in _frames(error):
        fsdp_param = local.get("self", local.get("fsdp_param"))
        if code in _OF_EXTENSIONS and _has_extension(fsdp_param):
            if not hasattr(fsdp_param, "_extensions_data"):
                return (
                    f"{_name(fsdp_param)} became a tensor that has fsdp_pre_all_gather "
                    "after it was taken as a plain one: replace it before the first "
                    "forward"
                )
            method, returns = _OF_EXTENSIONS[code]
            return _about_extension(fsdp_param, method, returns)
        if code == "_stage" and "plan" in local:
            return _about_inputs(local["fsdp_params"], local["tensors"], local["plan"])
    return None


def _frames(error: BaseException) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the names and the variables of the functions that an error came through."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        yield frame.f_code.co_name, frame.f_locals
        traceback = traceback.tb_next


def _about_inputs(
    fsdp_params: Sequence[FSDPParam], tensors: Sequence[torch.Tensor], plan: GatherPlan
) -> str | None:
    """Returns whose tensor cannot be copied from where it is, if any."""
    rest = iter(tensors)
    for fsdp_param, numels in zip(fsdp_params, plan.numels):
        device = fsdp_param.device
        if any(t.device.type != device.type for t in islice(rest, len(numels))):
            if _has_extension(fsdp_param):
                what = f"tensors on {device}"
                return _about_extension(fsdp_param, "fsdp_pre_all_gather", what)
    return None


def _about_extension(fsdp_param: FSDPParam, method: str, returns: str) -> str:
    return f"{method} of {_name(fsdp_param)} failed, or did not return {returns}"


def _has_extension(fsdp_param: Any) -> bool:
    local_tensor = getattr(fsdp_param, "_sharded_local_tensor", None)
    return hasattr(local_tensor, "fsdp_pre_all_gather")


def _name(fsdp_param: FSDPParam) -> str:
    return fsdp_param._param_fqn or fsdp_param._module_info.param_name


def _about_reduction(
    error: BaseException,
    unit: DescribedUnit,
    failed: UnitBucket,
    grads: Sequence[torch.Tensor],
) -> str | None:
    """Returns which gradient an error in a reduction is about, or what of the bucket."""
    params, bucket, _ = failed
    for fsdp_param, grad in zip(params, grads):
        if (wrong := _wrong_grad(fsdp_param, grad)) is not None:
            return f"The gradient of {fsdp_param._param_fqn} {wrong}"
    if bucket.comm_dtype is not None and "alltoall" in str(error).lower():
        names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in params)
        return (
            f"The gradients of {names} are sent in {bucket.comm_dtype} (grad_comm_dtype) "
            "by all_to_all_single, which failed. Use a backend that has it for "
            f"{unit.device.type}, or leave grad_comm_dtype out"
        )
    dtype, device = bucket.dtype, unit.device
    is_float = dtype.is_floating_point or dtype.is_complex
    if not is_float or not is_reducible(dtype, device):
        names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in params)
        return (
            f"The gradients of {names} cannot be averaged in {dtype} on {device}. Set "
            "reduce_dtype to torch.float32 for them, or do not train them"
        )
    for fsdp_param, slot in zip(params, bucket.slots):
        grad_dtype = slot.grad_dtype or dtype
        if (wrong := _wrong_sharded_grad(fsdp_param, grad_dtype)) is not None:
            return wrong
    return None


def _wrong_grad(fsdp_param: FSDPParam, grad: torch.Tensor) -> str | None:
    if grad.layout != torch.strided:
        return (
            f"is sparse ({grad.layout}), and only dense ones are reduced. Use "
            "nn.Embedding(sparse=False), or put the parameter in ignored_params"
        )
    if isinstance(grad, DTensor):
        return (
            "is a DTensor, but the parameter is none while it computes. Set its "
            "to_local() or full_tensor() instead"
        )
    if grad.size() != fsdp_param._orig_size:
        return (
            f"has size {tuple(grad.size())}, but the parameter has size "
            f"{tuple(fsdp_param._orig_size)}. Look for a hook that resizes it or sets "
            "its data"
        )
    return None


def _wrong_sharded_grad(fsdp_param: FSDPParam, grad_dtype: torch.dtype) -> str | None:
    """Returns why a parameter cannot be given a gradient, or have one added."""
    param, name, size = (
        fsdp_param.sharded_param,
        fsdp_param._param_fqn,
        fsdp_param.sharded_size,
    )
    if param.grad is None:
        if param.grad_dtype in (None, grad_dtype):
            return None
        return (
            f"{name} is {param.dtype} now, but its gradients are {grad_dtype}: cast a "
            "model before its first forward, not between steps"
        )
    local = getattr(param.grad, "_local_tensor", None)
    if local is None:
        return None
    is_float = local.is_floating_point() or local.is_complex()
    if is_float and local.size() == size:
        return None
    return (
        f"The gradient that {name} has is {local.dtype} of size {tuple(local.size())} "
        f"on this rank, to which one of {grad_dtype} and size {tuple(size)} cannot be "
        "added. Set None, or one that is sharded like the parameter"
    )
