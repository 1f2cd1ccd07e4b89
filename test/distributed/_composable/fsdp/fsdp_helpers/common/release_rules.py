"""What tests expect where releases differ. Runs on the release itself too."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy


# Since 2.15 autograd adds up unsharded gradients in the `grad_dtype` of the unsharded
# parameters, and a parameter's own is what its gradient is reduced in by default
IS_2_15 = hasattr(torch.Tensor, "_has_grad_dtype_override")

# Since 2.14 a group of frozen parameters tells their dtypes, which had none before
TELLS_FROZEN_DTYPES = hasattr(dist, "_spmd_no_typecheck")
# Whether the release works with the package of that name, and it is here
HAS_SPMD_TYPES = TELLS_FROZEN_DTYPES and dist._is_spmd_types_available()


def compute_dtype(policy: MixedPrecisionPolicy, stored: torch.dtype) -> torch.dtype:
    """Returns what a parameter is gathered in."""
    is_cast = policy.param_dtype is not None and stored.is_floating_point
    return policy.param_dtype if is_cast else stored


def reduce_dtype(policy: MixedPrecisionPolicy, stored: torch.dtype) -> torch.dtype:
    """Returns what the gradient of a parameter without a `grad_dtype` is reduced in."""
    if policy.reduce_dtype is not None and stored.is_floating_point:
        return policy.reduce_dtype
    return stored if IS_2_15 else compute_dtype(policy, stored)


def reduce_dtypes(
    policy: MixedPrecisionPolicy, stored: Iterable[torch.dtype]
) -> list[torch.dtype]:
    """Returns what a unit reduces such parameters in, in the order of its reductions."""
    found = {reduce_dtype(policy, dtype) for dtype in stored}
    return sorted(found, key=lambda dtype: (-dtype.itemsize, str(dtype)))
