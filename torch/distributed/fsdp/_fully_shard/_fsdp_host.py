"""
What the host that runs a step has: the installed release, observers, and cheaper forms
of what runs at each hook of a unit.

[Note: Who observes]
A `record_function` range costs several microseconds, an operator in Python more than
launching its kernel, and each unit has a dozen ranges and five operators a step. They
run for a profiler started from Python (torch sets a flag), one started on demand by a
daemon (Kineto: the profiler is on, without the flag), and an execution trace (a range
raises about an argument that cannot be recorded). The first unit of each forward, and
each in its lazy init, which an explicit unshard calls, look for the last two. What
starts later is seen from the next forward on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.profiler import record_function


_F = TypeVar("_F", bound=Callable[..., Any])


# The installed release. The other files here are the same on each. #

if not hasattr(dist, "all_gather_single"):
    raise ImportError(
        "These files of torch.distributed.fsdp fit PyTorch 2.13.0, 2.14.1 and 2.15.0. "
        f"This is {torch.__version__}, which lacks torch.distributed."
        "all_gather_single: install one of those"
    )

# Since 2.15 autograd accumulates unsharded gradients in a parameter's `grad_dtype`, and
# they are reduced in it unless the policy sets another dtype. Before, they were in the
# dtype of the forward, and those of microbatches were accumulated apart. With it,
# `foreach_reduce` has no argument for the dtype of sharded gradients, resetting an
# iteration drops them, and `fsdp::record_grad_output_stream` says what reads them.
FOLLOWS_GRAD_DTYPE: bool = hasattr(torch.Tensor, "_has_grad_dtype_override")

# Its operator, in C++, casts between bf16 and fp32 on CUDA (2.15)
HAS_MIXED_CHUNK_CAT: bool = hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype")
_IS_2_14: bool = hasattr(dist, "_spmd_no_typecheck")  # or newer
# Whether a frozen group has the dtypes of its floating-point parameters
FROZEN_GROUPS_HAVE_DTYPES: bool = _IS_2_14


# The optional package spmd_types (2.14) #

_HAS_SPMD_TYPES: bool = _IS_2_14 and dist._is_spmd_types_available()


def not_type_checked(hook: _F) -> _F:
    """Turns off the checks of ``spmd_types`` while a hook runs."""
    if not _HAS_SPMD_TYPES:
        return hook

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        # pyrefly: ignore [missing-attribute]
        with dist._spmd_no_typecheck():
            return hook(*args, **kwargs)

    return run  # pyrefly: ignore [bad-return]


def restore_spmd_types(fsdp_params: Sequence[Any]) -> None:
    """Annotates the unsharded parameters as users annotated the originals."""
    for fsdp_param in fsdp_params if _HAS_SPMD_TYPES else ():
        fsdp_param._restore_spmd_types(fsdp_param.unsharded_param)


def register_autograd_function(function: type) -> None:
    """Registers an autograd function of local tensors with ``spmd_types``."""
    if _HAS_SPMD_TYPES:
        import spmd_types  # pyrefly: ignore [missing-import]

        spmd_types.register_local_autograd_function(function)


# Observers #

NO_RANGE = contextlib.nullcontext()

_has_unflagged_observer = False
_PROBE = "FSDP::look_for_traces"


def look_for_traces() -> None:
    """Finds observers that torch sets no flag for."""
    global _has_unflagged_observer
    if profiler._is_profiler_enabled:
        return  # it would record the probes
    try:
        _record_function_with_args_enter(_PROBE, object())
        _has_unflagged_observer = _profiler_enabled()
    except RuntimeError:
        _has_unflagged_observer = True


def is_observed() -> bool:
    return _has_unflagged_observer or profiler._is_profiler_enabled


def gets_operators(device: torch.device) -> bool:
    """
    Whether a step must call the ``fsdp::`` operators rather than what these call: for
    observers, dispatch modes, and devices whose vendors may replace their kernels.
    """
    return is_observed() or _len_torch_dispatch_stack() > 0 or _is_vendors(device)


@functools.cache
def _is_vendors(device: torch.device) -> bool:
    return device.type not in ("cpu", "cuda")


def range_of(label: str) -> contextlib.AbstractContextManager:
    """Returns a profiler range, or nothing where nobody would see it."""
    return record_function(label) if is_observed() else NO_RANGE


# Cheaper forms #

# Types whose values contain no other values
_LEAVES = frozenset(
    (torch.Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None))
)


def _dynamo_disable(func: _F) -> _F:
    """Calls ``func`` directly in eager mode, and else by ``torch._dynamo.disable``."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        # Dynamo, which traces this, knows the first only
        if not torch.compiler.is_compiling() and get_eval_frame_callback() is None:
            return func(*args, **kwargs)
        if disabled is None:
            reason = "skipping FSDP hooks"
            disabled = torch._dynamo.disable(func, recursive=True, reason=reason)
        return disabled(*args, **kwargs)

    return call  # pyrefly: ignore [bad-return]


def without_grad(func: _F) -> _F:
    """The decorator ``torch.no_grad()`` at a fifth of its cost, in backward at none."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call  # pyrefly: ignore [bad-return]


def have_no_containers(values: Iterable[Any]) -> bool:
    """Whether no value is a container, at a tenth of the cost of walking through."""
    return _LEAVES.issuperset(map(type, values))
