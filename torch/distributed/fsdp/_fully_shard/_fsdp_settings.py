"""
What users set of units, beside the methods of ``FSDPModule``: when units prefetch in
backward, and which of their reductions are joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp.api import BackwardPrefetch

from ._fsdp_errors import check_has_units, check_is_module
from ._fsdp_layout import ReduceBucketCap
from ._fully_shard import FSDPModule


def _groups_of(module: nn.Module, recurse: bool, setter: str) -> Iterator[Any]:
    """Yields the param groups of a module's units."""
    check_is_module(module, setter)
    modules = [*module.modules()] if recurse else [module]
    units = [module for module in modules if isinstance(module, FSDPModule)]
    check_has_units(module, units, setter)
    for unit in units:
        yield from unit._get_fsdp_state()._fsdp_param_groups


def set_backward_prefetch(
    module: nn.Module,
    backward_prefetch: BackwardPrefetch | None,
    *,
    recurse: bool = True,
) -> None:
    """
    Sets when units start the all-gather of the unit whose backward comes next, where
    ``set_modules_to_backward_prefetch`` does not say which units to gather.

    - ``BackwardPrefetch.BACKWARD_PRE``, the default: before this unit's backward, which
      the all-gather overlaps with, at the cost of both units' parameters in memory.
    - ``BackwardPrefetch.BACKWARD_POST``: after it, when its parameters are freed. The
      all-gather overlaps with the reduce-scatter only. A unit none of whose inputs
      needs a gradient prefetches nothing.
    - None: not at all. Each unit gathers when its own backward begins.

    All ranks must set the same, as their collectives must come in the same order.

    Args:
        module (nn.Module): A module with units in it.
        backward_prefetch (BackwardPrefetch, optional): For all of its units, until
            it is set again.
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
    for group in _groups_of(module, recurse, "set_backward_prefetch"):
        group.backward_prefetch = backward_prefetch


def set_reduce_bucket_cap(
    module: nn.Module,
    bucket_cap_mb: float | None = 1.0,
    *,
    small_kb: float = 64.0,
    recurse: bool = True,
) -> None:
    """
    Lets small reductions of several units travel together. A reduce-scatter of a few KiB
    costs its latency and nothing else, which grows with the number of ranks. With a cap,
    gradients of a unit whose reduce-scatter would take at most ``small_kb`` wait. They
    are reduced with those of other units, one reduce-scatter (and one all-reduce over
    replicas) for each reduce dtype, when they have come to ``bucket_cap_mb``, as in DDP,
    and at the end of backward. Off by default.

    What changes: the gradients that wait stay in memory. Sharded gradients come, and
    their post-accumulate-grad hooks run, when they are reduced. A backend may add in
    another order, as the position of an element in the buffer is another one: with more
    than two ranks, sums may round otherwise (not with ``grad_comm_dtype``).

    Units with different process groups, divide factors or dtypes are not joined. Units
    do not wait that have a custom reduce-scatter, an all-reduce hook, memory from the
    process group or symmetric memory, or an all-reduce that is deferred or completes
    deferred ones.

    All ranks must set the same.

    Args:
        module (nn.Module): A module with units in it.
        bucket_cap_mb (float, optional): How many MiB are reduced at once, the gradients
            of one rank for all of them. ``None``: no reduction waits.
        small_kb (float): Up to how many KiB one reduction waits.
        recurse (bool): False: for the module's own unit only.

    Raises:
        TypeError: if ``module`` is not a module.
        ValueError: if a size is not positive, or if there is no such unit.
    """
    if bucket_cap_mb is not None and not (bucket_cap_mb > 0 and small_kb > 0):
        raise ValueError(
            "set_reduce_bucket_cap expects sizes above 0, or bucket_cap_mb=None to join "
            f"no reductions, but got {bucket_cap_mb=} and {small_kb=}"
        )
    cap = None
    if bucket_cap_mb is not None:
        cap = ReduceBucketCap(int(small_kb * 2**10), int(bucket_cap_mb * 2**20))
    for group in _groups_of(module, recurse, "set_reduce_bucket_cap"):
        group.reduce_bucket_cap = cap
