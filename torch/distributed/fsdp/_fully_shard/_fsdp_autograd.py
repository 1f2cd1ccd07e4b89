"""The autograd node that a unit's inputs pass, whose backward is post-backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._common_utils import (
    collect_grad_tensors,
    replace_grad_tensors,
)

from . import _fsdp_releases as releases


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on inputs that require gradients; its backward is post-backward."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, param_group: Any, *inputs: Tensor):
        if torch._C._are_functorch_transforms_active():
            return super().apply(param_group, *inputs)
        # `Function.apply` would inspect the signature for default arguments, of which
        # there are none. That takes 13 of its 18 us, 2 % of a unit's host time
        inputs = torch._functorch.utils.unwrap_dead_wrappers(inputs)
        directly = super(torch.autograd.Function, cls)
        # pyrefly: ignore [missing-attribute]
        return directly.apply(param_group, *inputs)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(param_group: Any, *inputs: Tensor):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.param_group = inputs[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.param_group.post_backward()
        ctx.param_group.after_post_backward(grads)
        return (None, *grads)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def jvp(ctx: Any, param_group_tangent: object, *grad_inputs: Tensor):
        # The group is no tensor and has no tangent. Post-backward comes from
        # the pre-backward hook on the outputs, after primals and tangents.
        return grad_inputs


releases.register_autograd_function(RegisterPostBackwardFunction)


def register_post_backward(
    param_group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Passes the inputs that need gradients through one autograd node, whose backward runs
    when their gradients are there, and with them those of the parameters.
    """
    inputs = [*args, *kwargs.values()]
    if not torch.is_grad_enabled() or not (tensors := collect_grad_tensors(inputs)):
        return args, kwargs  # the root's final callback comes to this group
    passed = iter(RegisterPostBackwardFunction.apply(param_group, *tensors))
    inputs = replace_grad_tensors(inputs, passed)
    return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :]))
