"""
What users set of units: the checks of it, and beside the methods of ``FSDPModule`` when
units prefetch in backward, and which of their reductions are joined.
"""

# Tests: bad_input, small_reductions
from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp.api import BackwardPrefetch

from ._fsdp_api import AllGather, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from ._fsdp_layout import ReduceBucketCap
from ._fsdp_registrations import groups_of


def set_backward_prefetch(
    module: nn.Module,
    backward_prefetch: BackwardPrefetch | None,
    *,
    recurse: bool = True,
) -> None:
    """
    Sets when units start the all-gather of the unit whose backward comes next, where
    ``set_modules_to_backward_prefetch`` does not say which. All ranks must agree.

    Args:
        module (nn.Module): A module with units in it.
        backward_prefetch (BackwardPrefetch, optional): ``BACKWARD_PRE``, the default:
            before this unit's backward, which the all-gather overlaps with, at the cost
            of both units' parameters in memory. ``BACKWARD_POST``: after it, when its
            parameters are freed: less is allocated at the peak, if not reserved, as each
            stream has its own pool. The all-gather overlaps with the reduce-scatter
            only, and a unit none of whose inputs needs a gradient prefetches nothing.
            ``None``: each unit gathers when its own backward begins.
        recurse (bool): False: for the module's own unit only.

    Raises:
        TypeError: if it is none of the three, or ``module`` is not a module.
        ValueError: if there is no such unit.
    """
    if not isinstance(backward_prefetch, BackwardPrefetch | None):
        raise TypeError(
            "set_backward_prefetch expects BackwardPrefetch.BACKWARD_PRE, "
            f"BackwardPrefetch.BACKWARD_POST or None, but got {backward_prefetch!r}"
        )
    for group in groups_of(module, "set_backward_prefetch", recurse):
        group.backward_prefetch = backward_prefetch


def set_reduce_bucket_cap(
    module: nn.Module,
    bucket_cap_mb: float | None = 1.0,
    *,
    small_kb: float = 64.0,
    recurse: bool = True,
) -> None:
    """
    Joins small reductions of several units. A reduce-scatter of a few KiB takes as long
    as its latency, which grows with the number of ranks. With a cap, gradients of a
    unit whose reduce-scatter would take at most ``small_kb`` wait. They are reduced
    with those of other units, in one reduce-scatter (and one all-reduce over replicas)
    for each reduce dtype, once they come to ``bucket_cap_mb``, as in DDP, and at the
    end of backward. Off by default. All ranks must set the same.

    The gradients that wait stay in memory. Sharded gradients are set, and their
    post-accumulate-grad hooks run, when they are reduced. With more than two ranks,
    sums may round differently, as a backend may add in another order elsewhere in a
    buffer (not with ``grad_comm_dtype``).

    Units with different process groups, divide factors or dtypes are not joined. Units
    with a custom reduce-scatter, an all-reduce hook, or memory from the process group
    or symmetric memory do not wait, nor does one whose all-reduce is deferred or
    completes deferred ones.

    Args:
        module (nn.Module): A module with units in it.
        bucket_cap_mb (float, optional): How many MiB are reduced at once, the gradients
            of one rank for all of them. ``None``: no reduction waits.
        small_kb (float): Up to how many KiB one reduction waits.
        recurse (bool): False: for the module's own unit only.

    Raises:
        TypeError: if ``module`` is not a module.
        ValueError: if a size is not positive and finite, or if there is no such unit.
    """
    cap = None
    if bucket_cap_mb is not None:
        sizes = bucket_cap_mb, small_kb
        if not all(_is_number(size) and 0 < size * 2**20 < math.inf for size in sizes):
            raise ValueError(
                "set_reduce_bucket_cap expects finite sizes above 0, or "
                "bucket_cap_mb=None to join no reductions, but got "
                f"{bucket_cap_mb=} and {small_kb=}"
            )
        cap = ReduceBucketCap(int(small_kb * 2**10), int(bucket_cap_mb * 2**20))
    for group in groups_of(module, "set_reduce_bucket_cap", recurse):
        group.reduce_bucket_cap = cap


def _is_comm(comm: Any, kind: type, other: type) -> bool:
    is_object = callable(comm) and not isinstance(comm, type)
    has_methods = is_object and callable(getattr(comm, "allocate", None))
    return has_methods and (isinstance(comm, kind) or not isinstance(comm, other))


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_scalar or isinstance(value, numbers.Real)


# By attribute of the param group: whether a value is right, and what is said if not
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mp_policy": (
        lambda policy: isinstance(policy, MixedPrecisionPolicy),
        "mp_policy of unit '{}' is {!r}: pass a MixedPrecisionPolicy, or leave it out",
    ),
    "offload_policy": (  # None has always meant not to offload
        lambda policy: policy is None or isinstance(policy, OffloadPolicy),
        "offload_policy of unit '{}' is {!r}: pass CPUOffloadPolicy(), or leave it out",
    ),
    "_all_gather_comm": (
        lambda comm: _is_comm(comm, AllGather, ReduceScatter),
        "set_custom_all_gather of unit '{}' got {!r}: pass an object with the methods "
        "of AllGather",
    ),
    "_reduce_scatter_comm": (
        lambda comm: _is_comm(comm, ReduceScatter, AllGather),
        "set_custom_reduce_scatter of unit '{}' got {!r}: pass an object with the "
        "methods of ReduceScatter",
    ),
    "_all_reduce_hook": (
        lambda hook: hook is None or callable(hook),
        "set_all_reduce_hook of unit '{}' got {!r}: pass a function of the buffer",
    ),
    "gradient_divide_factor": (
        lambda x: x is None or (_is_number(x) and math.isfinite(x) and x != 0),
        "set_gradient_divide_factor of unit '{}' got {!r}: pass a finite number other "
        "than 0",
    ),
}


def check_setting(name: str, value: Any, unit_name: str) -> None:
    """Raises if a unit's setting cannot have this value."""
    is_right, message = _SETTINGS[name]
    if not is_right(value):
        is_factor = name == "gradient_divide_factor" and _is_number(value)
        kind = ValueError if is_factor else TypeError
        raise kind(message.format(unit_name, value))
