"""
What errors say of the parameter that they are about, and what to do.

[Note: Looked at when it fails]
A step has no time to look at all that it is given, and most of what is wrong makes
something fail in it anyway. Only then are the functions here called, to find out
what it was. They name the parameter, keep the kind of the error that others may
catch, and leave alone what they have no explanation for.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._fsdp_api import (
    _is_reducible,
    AllGather,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from ._fsdp_param import FSDPParam


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


def raise_with(error: Exception, text: str) -> NoReturn:
    """Raises an error of the same kind that says ``text`` before its own."""
    if type(error) not in _MADE_OF_TEXT:
        raise error
    raise type(error)(f"{text}: {error}") from error


# When a unit is made #


def check_policies(mp_policy: Any, offload_policy: Any, unit: str) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy of unit '{unit}' must be a MixedPrecisionPolicy, but it is "
            f"{mp_policy!r}: pass MixedPrecisionPolicy(param_dtype=...), or leave it out"
        )
    # None has always meant not to offload
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy of unit '{unit}' must be an OffloadPolicy, but it is "
            f"{offload_policy!r}, which would offload nothing: pass "
            "CPUOffloadPolicy(), or leave it out"
        )


def how_to_shard(
    param: nn.Parameter, offload_policy: OffloadPolicy, is_placed: bool
) -> str:
    """Returns what to do about a parameter that cannot be sharded."""
    if param.layout != torch.strided or param.is_quantized:
        return (
            "Only dense parameters can be: call to_dense() or dequantize() on it "
            "first, or put it in ignored_params"
        )
    if isinstance(param, DTensor):
        return (
            "It is a DTensor already: call fully_shard on children before their "
            "parents, and otherwise let its mesh have named dims that do not "
            "overlap with FSDP's, or name those in dp_mesh_dims"
        )
    if not param.is_contiguous():
        return "Make it contiguous first: nn.Parameter(param.detach().contiguous())"
    is_pinned = isinstance(offload_policy, CPUOffloadPolicy)
    if is_pinned and offload_policy.pin_memory and not torch.accelerator.is_available():
        return "Without an accelerator use CPUOffloadPolicy(pin_memory=False)"
    if is_placed:
        return (
            "shard_placement_fn must return Shard of a dim that it has, which must "
            "divide by the ranks unless it is dim 0"
        )
    return "Mend it, or put it in ignored_params"


def check_reshards(fsdp_param: FSDPParam, ranks: int, name: str) -> None:
    """Raises if a parameter cannot be resharded to ``ranks`` after forward."""
    dim, size = fsdp_param.fsdp_placement.dim, fsdp_param._orig_size
    if dim != 0 and size[0] % ranks != 0:
        raise ValueError(
            f"{name} of size {tuple(size)} is sharded on dim {dim}, and cannot be "
            f"resharded to {ranks} ranks after forward, which cuts dim 0: let "
            "reshard_after_forward be True or False, or a factor of that dim"
        )


def check_grad_dtype(param: nn.Parameter, name: str) -> None:
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


def check_all_gather(comm: Any, unit: str) -> None:
    _check_comm(comm, unit, "set_custom_all_gather", AllGather, ReduceScatter)


def check_reduce_scatter(comm: Any, unit: str) -> None:
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


def check_all_reduce_hook(hook: Any, unit: str) -> None:
    if hook is not None and not callable(hook):
        raise TypeError(
            f"set_all_reduce_hook of unit '{unit}' got {hook!r}, which cannot be "
            "called: pass a function of the reduced buffer"
        )


def check_divide_factor(factor: Any, unit: str) -> None:
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


# When parameters are taken as they are #


def what_is_registered(fsdp_param: FSDPParam, name: str) -> str | None:
    """
    Returns what is wrong with what a module has under a parameter's name, None if
    nothing that can be seen.
    """
    info = fsdp_param._module_info
    found = getattr(info.module, info.param_name, None)
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
        f"{type(found).__name__}. Replace it before fully_shard, or copy into it; "
        "for load_state_dict, shard with distribute_tensor what is not"
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


def raise_about_extension(
    error: Exception, fsdp_param: FSDPParam, method: str, returns: str
) -> NoReturn:
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    raise_with(error, f"{method} of {name} failed, or did not return {returns}")


def raise_about_late_extension(fsdp_param: FSDPParam) -> NoReturn:
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    raise AttributeError(
        f"{name} became a tensor that has fsdp_pre_all_gather after it was taken as a "
        "plain one: replace it before the first forward"
    )


def raise_about_inputs(
    error: Exception,
    fsdp_params: Sequence[FSDPParam],
    tensors: Sequence[torch.Tensor],
    counts: Sequence[int],
) -> NoReturn:
    """Raises an error in the copy-in, which shards alone do not make."""
    rest = iter(tensors)
    for fsdp_param, count in zip(fsdp_params, counts):
        for tensor in islice(rest, count):
            if tensor.device.type != fsdp_param.device.type:
                method, returns = (
                    "fsdp_pre_all_gather",
                    f"tensors on {fsdp_param.device}",
                )
                raise_about_extension(error, fsdp_param, method, returns)
    raise error


def check_unsharded(fsdp_param: FSDPParam) -> None:
    """Sees to what an extension returned first, which is used without a look."""
    param, inner = fsdp_param._unsharded_param, fsdp_param._unsharded_inner_tensors
    if param.device.type != fsdp_param.device.type:
        raise ValueError(f"the tensor is on {param.device}, not {fsdp_param.device}")
    if any(not isinstance(tensor, torch.Tensor) for tensor in inner):
        raise TypeError(f"the tensors to free are {inner!r}")


def check_outputs_fit(
    fsdp_params: Sequence[FSDPParam],
    dtypes: Sequence[Sequence[torch.dtype]],
    numels: Sequence[Sequence[int]],
) -> None:
    """
    Raises if what is now to be gathered would not become what was gathered first,
    which views of autograd's and kernels keep to.
    """
    for fsdp_param, fresh, sizes in zip(fsdp_params, dtypes, numels, strict=True):
        name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
        outputs = fsdp_param.all_gather_outputs
        if not sizes:
            raise ValueError(
                f"fsdp_pre_all_gather of {name} returned no tensor to gather: return "
                "((tensor, ...), metadata)"
            )
        if [output.numel() for output in outputs] == [*sizes]:
            continue  # of a single rank's, copied and cast
        kept = [output.dtype for output in outputs]
        if outputs and kept != [*fresh]:
            raise RuntimeError(
                f"{name} was gathered as {_listed(kept)} before, and would be as "
                f"{_listed(fresh)} now: cast a model, or load another dtype with "
                "assign=True, before its first forward"
            )


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def raise_about_grads(
    error: Exception, fsdp_params: Sequence[FSDPParam], grads: Sequence[torch.Tensor]
) -> NoReturn:
    """Raises an error in the copy of gradients, with what is wrong with which."""
    for fsdp_param, grad in zip(fsdp_params, grads):
        if (wrong := _wrong_grad(fsdp_param, grad)) is not None:
            raise_with(error, f"The gradient of {fsdp_param._param_fqn} {wrong}")
    raise error


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


def raise_about_bucket(
    error: Exception,
    fsdp_params: Sequence[FSDPParam],
    dtype: torch.dtype,
    device: torch.device,
) -> NoReturn:
    """Raises an error in a reduction, with the parameters if their dtype explains it."""
    is_float = dtype.is_floating_point or dtype.is_complex
    if is_float and _is_reducible(dtype, device):
        raise error
    names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in fsdp_params)
    raise_with(
        error,
        f"The gradients of {names} cannot be averaged in {dtype} on {device}. Set "
        "reduce_dtype to torch.float32 for them, or do not train them",
    )


def raise_about_sharded_grad(
    error: Exception, fsdp_param: FSDPParam, sharded_grad: torch.Tensor
) -> NoReturn:
    """Raises an error in handing over a reduced gradient, if it can be explained."""
    param, name = fsdp_param.sharded_param, fsdp_param._param_fqn
    if param.grad is None and param.grad_dtype not in (None, sharded_grad.dtype):
        raise_with(
            error,
            f"{name} is {param.dtype} now, but its gradients are {sharded_grad.dtype}: "
            "cast a model before its first forward, not between steps",
        )
    local = getattr(param.grad, "_local_tensor", None)
    if local is not None and (
        local.size() != sharded_grad.size()
        or not (local.is_floating_point() or local.is_complex())
    ):
        raise_with(
            error,
            f"The gradient that {name} has is {local.dtype} of size "
            f"{tuple(local.size())} on this rank, to which one of "
            f"{sharded_grad.dtype} and size {tuple(sharded_grad.size())} cannot be "
            "added. Set None, or one that is sharded like the parameter",
        )
    raise error


def raise_about_comm(comm: Any, setter: str, wrong: str) -> NoReturn:
    raise ValueError(
        f"{type(comm).__name__}.allocate, from {setter}, returned {wrong}: return a "
        "contiguous tensor of the size, dtype and device that it is asked for"
    )
