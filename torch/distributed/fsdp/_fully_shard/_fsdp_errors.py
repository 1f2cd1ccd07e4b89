"""
Adds the parameter's name, and advice that follows from it, to errors of torch and
backends. Only what would be silently wrong, or hang some ranks, is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._fsdp_param import FSDPParam
from ._fsdp_policies import REDUCIBLE


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, which tracebacks show below the message."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Joins the first eight texts, and says how many more there are."""
    more = [f"and {len(texts) - 8} more"] if len(texts) > 8 else []
    return separator.join([*texts[:8], *more])


def note_sharding(error: Exception, param: torch.Tensor, name: str) -> None:
    note = f"Parameter {name} cannot be sharded."
    if isinstance(param, DTensor):
        note += " It is a DTensor. Call fully_shard on children before parents, "
        note += "and tensor parallelism with named mesh dims other than FSDP's."
    elif type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        methods = "fsdp_pre_all_gather, split, new_zeros and copy_"
        kind = type(param).__name__
        note += f" Implement {methods} in {kind}, or put it in ignored_params."
    add_note(error, note)


def check_param(fsdp_param: FSDPParam, name: str) -> None:
    """Raises if what a module has as this parameter cannot be sharded, or trained."""
    info = fsdp_param._module_info
    param = getattr(info.module, info.param_name, None)
    if not isinstance(param, DTensor):
        raise RuntimeError(
            f"{name} must be the DTensor that fully_shard made of it, but it is a "
            f"{type(param).__name__}. Replace or delete it before fully_shard, or load "
            "a full state dict by set_model_state_dict with full_state_dict=True"
        )
    if not param.is_leaf:
        raise RuntimeError(
            f"{name} is computed from other tensors and can get no gradient. Parametrize "
            "it before fully_shard, and run a forward before a functional_call"
        )
    shard, shard_size = param._local_tensor, fsdp_param.sharded_size
    spec, dtype = fsdp_param._unsharded_dtensor_spec, param.grad_dtype
    size = fsdp_param._orig_size if spec is None else spec.shape
    # A shard without elements may have any shape, and a tensor class any dtype
    is_empty = shard_size.numel() == shard.numel() == 0
    has_size = param.size() == size and (shard.size() == shard_size or is_empty)
    if not has_size or (type(shard) is torch.Tensor and shard.dtype != param.dtype):
        raise RuntimeError(
            f"{name} is {param.dtype} {[*param.size()]} with a shard that is {shard.dtype} "
            f"{[*shard.size()]}, but was sharded from {[*size]} to {[*shard_size]}. Resize "
            "it before fully_shard, cast it by module.to(dtype), and load equal shards"
        )
    has_fractions = dtype is None or dtype.is_floating_point or dtype.is_complex
    if param.requires_grad and not has_fractions:
        raise ValueError(f"grad_dtype of {name} is {dtype}: set a floating-point dtype")


def note_extension(error: Exception, param: Any, method: str, result: str) -> None:
    name = param._param_fqn or param._module_info.param_name
    add_note(error, f"{method} of {name} failed, or did not return {result}")


def note_reduction(error: Exception, parts: Sequence[Any]) -> None:
    """``parts``: the ``BucketGrads`` in whose reduction the error was raised."""
    names = [str(p._param_fqn) for part in parts for p in part.fsdp_params]
    dtypes = dict.fromkeys(part.bucket.dtype for part in parts)
    note = f"Raised while reducing the gradients of {listed(names)} in "
    note += " and ".join(map(str, dtypes))
    if not dtypes.keys() <= {*REDUCIBLE}:
        note += ". If that cannot be averaged, set reduce_dtype to torch.float32"
    if parts[0].bucket.comm_dtype is not None:
        note += ". If the backend lacks all_to_all_single, leave grad_comm_dtype out"
    for part in parts:
        # The copy-in drops the gradients
        for fsdp_param, grad in zip(part.fsdp_params, part.unsharded_grads):
            size, is_dense = fsdp_param._orig_size, grad.layout == torch.strided
            if not is_dense or isinstance(grad, DTensor) or grad.size() != size:
                note += f"\nThe gradient of {fsdp_param._param_fqn} is a {grad.layout} "
                note += f"{type(grad).__name__} {[*grad.size()]}, not a dense tensor "
                note += f"{[*size]}: look for a hook or nn.Embedding(sparse=True)"
    add_note(error, note)
