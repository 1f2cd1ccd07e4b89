"""Wrong uses of gradients, which are found in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_wrong_uses.rows import (
    add_each,
    Case,
    DIM,
    INT32,
    Lookup,
    Narrow,
    Run,
    STEPPING,
    wrong,
)

import torch
import torch.nn as nn


def with_hook(change: Callable[[Run, nn.Parameter], object]) -> Case:
    """Of a step in which a gradient of the second block is changed by a hook."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained(reshard_after_forward=False)
        loss = model(run.input()).sum()
        param = run.blocks[1].gain
        handle = param.register_post_accumulate_grad_hook(lambda p: change(run, p))
        param.grad_dtype = None

        def mend() -> None:
            handle.remove()
            param.grad_dtype = param.dtype

        run.mend = mend
        return loss.backward

    return case


def set_grad(grad: Callable[[Run], torch.Tensor]) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad = None
        param.grad = grad(run)

    return with_hook(change)


def set_grad_data(numel: int) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad.data = torch.ones(numel, device=run.device)

    return with_hook(change)


add_each(
    STEPPING,
    [
        (
            f"gradient_of_{numel}",
            f"a hook sets the data of a gradient to {what} one",
            set_grad_data(numel),
            RuntimeError,
            f"The gradient of 1.gain has size ({numel},), but the parameter has size",
        )
        for numel, what in ((9, "a larger"), (1, "a smaller"))
    ],
    found="backward",
    do="Look for a hook that resizes it or sets its data",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            "sparse_gradient",
            "a hook makes a gradient sparse",
            set_grad(lambda run: torch.ones(DIM, device=run.device).to_sparse()),
            RuntimeError,
            "The gradient of 1.gain is sparse",
        )
    ],
    found="backward",
    do="only dense ones are reduced",
    about="1.gain",
)


@wrong(
    STEPPING,
    "`nn.Embedding(sparse=True)`",
    "backward",
    RuntimeError,
    "The gradient of table.weight is sparse",
    "Use nn.Embedding(sparse=False), or put the parameter in ignored_params",
    "table.weight",
)
def sparse_embedding(run: Run) -> Callable[[], object]:
    model = run.fully_shard(Lookup().to(run.device))
    return lambda: run.step(model)


add_each(
    STEPPING,
    [
        (
            "distributed_gradient",
            "a hook sets a DTensor as the gradient of a whole parameter",
            set_grad(lambda run: run.replicated()),
            RuntimeError,
            "The gradient of 1.gain is a DTensor",
        )
    ],
    found="backward",
    do="set its to_local() or full_tensor() instead",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            "integer_gradient",
            "a hook sets an integer gradient",
            set_grad(lambda run: torch.ones(DIM, dtype=INT32, device=run.device)),
            RuntimeError,
            "The gradients of 1.gain cannot be averaged in torch.int32",
        )
    ],
    found="backward",
    do="Set reduce_dtype to torch.float32",
    about="1.gain",
)


@wrong(
    STEPPING,
    "a float8 parameter trains where nothing adds float8",
    "backward",
    NotImplementedError,
    "The gradients of narrow cannot be averaged in torch.float8_e4m3fn",
    "Set reduce_dtype to torch.float32",
    "narrow",
)
def float8_parameter(run: Run) -> Callable[[], object]:
    model = run.fully_shard(Narrow().to(run.device))
    return lambda: run.step(model)


def on_sharded(grad: Callable[[Run, nn.Parameter], torch.Tensor]) -> Case:
    """Of a step that finds a gradient on the sharded parameter."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        param = run.blocks[1].gain
        param.grad_dtype = None
        param.grad = grad(run, param)

        def mend() -> None:
            param.grad = None
            param.grad_dtype = param.dtype

        run.mend = mend
        return lambda: run.step(model)

    return case


def plain_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return torch.ones(DIM, device=run.device)


def whole_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return run.replicated()


def integer_grad(run: Run, param: nn.Parameter) -> torch.Tensor:
    return run.like(param, torch.ones_like(param.to_local(), dtype=INT32))


add_each(
    STEPPING,
    [
        (
            "plain_gradient_of_shard",
            "a plain tensor is set as the gradient of a sharded parameter",
            on_sharded(plain_grad),
            AssertionError,
            "The gradient of 1.gain must be a DTensor like its sharded parameter",
        )
    ],
    found="backward",
    do="do not set the gradient of a sharded parameter to a plain tensor",
    about="1.gain",
)
add_each(
    STEPPING,
    [
        (
            name,
            f"{what} is set as the gradient of a sharded parameter",
            on_sharded(grad),
            RuntimeError,
            "The gradient that 1.gain has is",
        )
        for name, what, grad in (
            ("whole_gradient_of_shard", "a replicated DTensor", whole_grad),
            ("integer_gradient_of_shard", "an integer DTensor", integer_grad),
        )
    ],
    found="backward",
    do="Set None, or one that is sharded like the parameter",
    about="1.gain",
)


@wrong(
    STEPPING,
    "a custom `autograd.Function` returns a gradient of another shape",
    "backward",
    RuntimeError,
    "Function ShapelessBackward returned an invalid gradient at index 0",
    "return one of the input's shape",
    is_ours=False,
)
def function_of_another_shape(run: Run) -> Callable[[], object]:
    class Shapeless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gain: torch.Tensor) -> torch.Tensor:
            return gain.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.ones(DIM + 1, device=run.device)

    model = run.trained()
    handle = run.blocks[1].register_forward_hook(
        lambda block, args, output: output * Shapeless.apply(block.gain),
        prepend=True,  # before the unit reshards
    )
    run.mend = handle.remove
    return lambda: run.step(model)


@wrong(
    STEPPING,
    "a second backward through the same graph",
    "second backward",
    RuntimeError,
    "Trying to backward through the graph a second time",
    "`backward(retain_graph=True)` the first time",
    is_ours=False,
)
def second_backward(run: Run) -> Callable[[], object]:
    loss = run.trained()(run.input()).sum()
    loss.backward()
    run.mend = lambda: None
    return loss.backward
