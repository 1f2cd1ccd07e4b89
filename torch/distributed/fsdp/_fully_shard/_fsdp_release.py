"""
What the release underneath has. The other files here are the same on every release.

Each answer is found once, at import, by asking for the thing itself. Where a duty has
moved between the release's files and ours, the answer says whose it is now.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from ._fsdp_param import FSDPParam


_F = TypeVar("_F", bound=Callable[..., Any])

# Older releases have it under another name
if not hasattr(dist, "all_gather_single"):
    raise ImportError(
        "These files of torch.distributed.fsdp fit PyTorch 2.13.0, 2.14.1 and 2.15.0. "
        f"This is {torch.__version__}, which lacks torch.distributed."
        "all_gather_single: install one of those"
    )

# Since 2.15 a parameter's `grad_dtype` says in which dtype autograd adds up its
# unsharded gradients, those of several microbatches too, and in which they are reduced
# where the policy says nothing. Before, gradients were in the dtype of the forward,
# and those of microbatches were added up apart from the unsharded parameters.
FOLLOWS_GRAD_DTYPE: bool = hasattr(torch.Tensor, "_has_grad_dtype_override")

# What went with it: `foreach_reduce` takes no dtype for the sharded gradients, as each
# parameter has its own; giving up an iteration drops the sharded gradients too; and
# `fsdp::record_grad_output_stream` tells a device which stream reads them.

# Since 2.14 a group of frozen parameters tells the dtypes of its floating-point ones
TELLS_FROZEN_DTYPES: bool = hasattr(dist, "_spmd_no_typecheck")  # came with it


def default_reduce_dtype(fsdp_param: FSDPParam) -> torch.dtype | None:
    """
    Returns what a parameter's gradient is reduced in, None for its own dtype. The
    policy's dtype comes first.
    """
    dtype = fsdp_param.mp_policy.reduce_dtype
    if dtype is None and FOLLOWS_GRAD_DTYPE:
        return fsdp_param.sharded_param.grad_dtype
    return dtype


# Storage that stays #


def keeps_storage(fsdp_params: Sequence[FSDPParam]) -> bool:
    """Returns whether unsharded storage of any of them outlives resharding (2.15)."""
    if not FOLLOWS_GRAD_DTYPE:  # came with it
        return False
    # pyrefly: ignore [missing-attribute]
    return any(fsdp_param.keep_unsharded_storage for fsdp_param in fsdp_params)


# spmd_types (2.14) #

# The package is optional, and checks the types of what runs unless it is told not to
_HAS_SPMD_TYPES: bool = (
    hasattr(dist, "_spmd_no_typecheck") and dist._is_spmd_types_available()
)


def not_type_checked(hook: _F) -> _F:
    """Lets a hook run with the checks of ``spmd_types`` off, where there are any."""
    if not _HAS_SPMD_TYPES:
        return hook

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        # pyrefly: ignore [missing-attribute]
        with dist._spmd_no_typecheck():
            return hook(*args, **kwargs)

    return run  # pyrefly: ignore [bad-return]


def restore_spmd_types(fsdp_params: Sequence[FSDPParam]) -> None:
    """Annotates the unsharded parameters as users annotated the originals."""
    if not _HAS_SPMD_TYPES:
        return
    for fsdp_param in fsdp_params:
        # pyrefly: ignore [missing-attribute]
        fsdp_param._restore_spmd_types(fsdp_param.unsharded_param)


def register_autograd_function(function: type) -> None:
    """Makes an autograd function known to ``spmd_types`` as one of local tensors."""
    if _HAS_SPMD_TYPES:
        import spmd_types  # pyrefly: ignore [missing-import]

        spmd_types.register_local_autograd_function(function)


# Operators #


def has_operator(name: str) -> bool:
    """Returns whether the release's C++ has the operator ``fsdp::name``."""
    return f"fsdp::{name}" in torch._C._dispatch_get_all_op_names()
