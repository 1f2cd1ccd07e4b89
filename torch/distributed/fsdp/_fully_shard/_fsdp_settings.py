"""When units prefetch in backward."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.fsdp.api import BackwardPrefetch

from ._fully_shard import FSDPModule


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
        TypeError: if it is none of the three.
        ValueError: if there is no such unit.
    """
    if not isinstance(backward_prefetch, BackwardPrefetch | None):
        raise TypeError(
            "set_backward_prefetch expects BackwardPrefetch.BACKWARD_PRE, "
            f"BackwardPrefetch.BACKWARD_POST or None, but got {backward_prefetch!r}"
        )
    modules = [*module.modules()] if recurse else [module]
    units = [module for module in modules if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError(
            f"set_backward_prefetch found no unit in {type(module).__name__}: call "
            "fully_shard or replicate on it, or on modules in it, first"
        )
    for unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group.backward_prefetch = backward_prefetch
