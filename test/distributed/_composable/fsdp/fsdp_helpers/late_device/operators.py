"""What operators and collectives do with their tensors, and who records them."""

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


PLAIN = (torch.Tensor, torch.nn.Parameter)

# They allocate, and neither read nor write
ALLOCATING = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "new_empty")
    + ("new_empty_strided", "empty_permuted")
)


@functools.cache
def is_view(func: torch._ops.OpOverload) -> bool:
    aliases = [arg.alias_info for arg in func._schema.arguments if arg.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@functools.cache
def written_names(func: torch._ops.OpOverload) -> frozenset[str]:
    return frozenset(
        arg.name
        for arg in func._schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write
    )


@functools.cache
def argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(arg.name for arg in func._schema.arguments)


# Methods of groups that do several of these at once
COALESCED = {
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
}


def exchange(name: str, source: torch.Tensor, target: torch.Tensor, ranks: int) -> None:
    """Runs a collective of one rank, as if all ranks brought what this one does."""
    flat = source.reshape(-1)
    if name.startswith("all_gather"):
        flat = flat.repeat(ranks)
    # A sum becomes the mean, whose first part each rank gets
    target.copy_(flat[: target.numel()].view(target.size()))


def is_on_device(value: Any) -> bool:
    """Says whether a value is a tensor of the device, for which the CPU stands in."""
    return type(value) in PLAIN and value.device.type == "cpu"


class OperatorMode(TorchDispatchMode):
    """Hands all operators on plain tensors to ``rank.issue``."""

    def __init__(self, rank: Any):
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor finds a placement
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # its own dispatch comes here with plain tensors
        return self.rank.issue(func, args, kwargs)
