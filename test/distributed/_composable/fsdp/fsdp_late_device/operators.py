"""What operators and collectives do with their tensors, and who is told of them."""

from __future__ import annotations

import functools
from typing import Any

from fsdp_late_device.sites import CHECKERS

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


CHECKERS.add(__file__)

PLAIN = (torch.Tensor, torch.nn.Parameter)

# They allocate, and neither read nor write
ALLOCATING = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "new_empty")
    + ("new_empty_strided", "empty_permuted")
)
HOST_READING = frozenset(("aten::_local_scalar_dense", "aten::equal"))


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


@functools.cache
def draws_random_numbers(func: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def flat(value: Any) -> list[Any]:
    """Returns what an operator is given, or returns, without lists around it."""
    if isinstance(value, (list, tuple)):
        return [item for items in value for item in flat(items)]
    return [value]


# Function of `torch.distributed` to the names of its input and its output
COLLECTIVES = {
    "all_gather_single": ("input_tensor", "output_tensor"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "reduce_scatter_single": ("input", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "all_reduce": ("tensor", "tensor"),
    "all_to_all_single": ("input", "output"),
}


def is_on_device(value: Any) -> bool:
    """Says whether a value is a tensor of the device, for which the CPU stands in."""
    return type(value) in PLAIN and value.device.type == "cpu"


def functional_call(name: str, given: dict[str, Any]) -> tuple[str | None, list[int]]:
    """
    Returns how the functional collective of that name and arguments reduces, and the
    size of its result.
    """
    operation = given.get("reduce_op")
    size = [*given["input"].size()]
    if name in ("all_gather_into_tensor", "all_gather_single"):
        size[0] *= given["group_size"]
    elif name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        size[0] //= given["group_size"]
    elif name != "all_reduce":
        raise NotImplementedError(f"the functional collective {name}")
    return operation and operation.upper(), size


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
        if self.rank.is_paused:
            return func(*args, **kwargs)
        return self.rank.issue(func, args, kwargs)
