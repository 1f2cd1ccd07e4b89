"""Cheaper forms of what runs at each hook of a unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from typing_extensions import ParamSpec

import torch
import torch.nn as nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.tensor import DTensor


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Types whose values contain no other values
_LEAVES = frozenset(
    (torch.Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None))
)


def _dynamo_disable(func: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Calls ``func`` directly in eager mode, and else by ``torch._dynamo.disable``."""
    disabled: Callable[_Args, _Result] | None = None

    @functools.wraps(func)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        nonlocal disabled
        # Dynamo, which traces this, knows the first only
        if not torch.compiler.is_compiling() and get_eval_frame_callback() is None:
            return func(*args, **kwargs)
        if disabled is None:
            reason = "skipping FSDP hooks"
            disabled = torch._dynamo.disable(func, recursive=True, reason=reason)
        return disabled(*args, **kwargs)

    return call


def without_grad(func: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The decorator ``torch.no_grad()`` at a fifth of its cost, in backward at none."""

    @functools.wraps(func)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call


def are_leaves(values: Iterable[Any]) -> bool:
    """Whether no value is a container, at a tenth of the cost of walking through."""
    return _LEAVES.issuperset(map(type, values))
