"""Wrong uses that are found in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_parity.models import Extended
from fsdp_wrong_uses.run import (
    BF16,
    Case,
    DIM,
    Errors,
    FP8,
    FP64,
    INT32,
    Run,
    Scaled,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


STEPPING = Errors()

# Gradients #


def in_hook(change: Callable[[Run, nn.Parameter], object]) -> Case:
    """Of a step in which a gradient of the second block is changed by a hook."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained(reshard_after_forward=False)
        loss = model(run.input()).sum()
        param = run.blocks[1].gain
        handle = param.register_post_accumulate_grad_hook(lambda p: change(run, p))
        param.grad_dtype = None

        def undo() -> None:
            handle.remove()
            param.grad_dtype = param.dtype

        run.undo = undo
        return loss.backward

    return case


def hook_sets(grad: Callable[[Run], torch.Tensor]) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad = None
        param.grad = grad(run)

    return in_hook(change)


def hook_resizes(numel: int) -> Case:
    def change(run: Run, param: nn.Parameter) -> None:
        param.grad.data = run.ones(numel)

    return in_hook(change)


for _numel in (9, 1):
    STEPPING.add(
        RuntimeError,
        f"The gradient of 1.gain is a torch.strided Tensor [{_numel}], not a dense "
        "tensor [6]: look for a hook",
        **{f"gradient_of_{_numel}": hook_resizes(_numel)},
    )
STEPPING.add(
    RuntimeError,
    "The gradient of 1.gain is a torch.sparse_coo…nn.Embedding(sparse=True)",
    sparse_gradient=hook_sets(lambda run: run.ones(DIM).to_sparse()),
)
STEPPING.add(
    RuntimeError,
    "The gradient of 1.gain is a torch.strided DTensor [6], not a dense tensor",
    distributed_gradient=hook_sets(lambda run: run.replicated()),
)
STEPPING.add(
    RuntimeError,
    "Raised while reducing the gradients of 1.gain in torch.int32…set reduce_dtype to "
    "torch.float32",
    integer_gradient=hook_sets(lambda run: run.ones(DIM, dtype=INT32)),
)


class Narrow(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.narrow.to(x.dtype)


def float8_parameter(run: Run) -> Callable[[], object]:
    narrow = nn.Parameter(run.ones(DIM, dtype=FP8))
    model = run.fully_shard(Narrow(narrow=narrow).to(run.device))
    return lambda: run.step(model)


STEPPING.add(
    NotImplementedError,
    "Raised while reducing the gradients of narrow in torch.float8_e4m3fn…set "
    "reduce_dtype to torch.float32",
    float8_parameter=float8_parameter,
)


def on_sharded(grad: Callable[[Run, Any], torch.Tensor]) -> Case:
    """Of a step that finds a gradient on the sharded parameter."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        param = run.blocks[1].gain
        param.grad_dtype = None
        param.grad = grad(run, param)

        def undo() -> None:
            param.grad = None
            param.grad_dtype = param.dtype

        run.undo = undo
        return lambda: run.step(model)

    return case


STEPPING.add(
    AssertionError,
    "The gradient of 1.gain is a Tensor: set the gradient of a sharded parameter to a "
    "DTensor",
    plain_gradient_of_shard=on_sharded(lambda run, param: run.ones(DIM)),
)
STEPPING.add(
    RuntimeError,
    "Raised while reducing the gradients of 1.gain in torch.float32",
    whole_gradient_of_shard=on_sharded(lambda run, param: run.replicated()),
    integer_gradient_of_shard=on_sharded(
        lambda run, param: run.like(param, param.to_local().detach().to(INT32))
    ),
)

# Dtypes #


def cast_between_steps(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.blocks[1].to(FP64)
    return lambda: model(run.input())


def loads_another_dtype(run: Run) -> Callable[[], object]:
    model = run.trained()
    state = dict(model.state_dict())
    state["1.weight"] = state["1.weight"].to(torch.float16)
    model.load_state_dict(state, assign=True)
    return lambda: model(run.input())


def data_is_cast(has_grad: bool) -> Case:
    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        if has_grad:
            run.step(model)
        gain = run.blocks[1].gain
        gain.data = gain.data.to(BF16)
        return lambda: run.step(model)

    return case


for _case, _dtype in ((cast_between_steps, FP64), (loads_another_dtype, torch.float16)):
    STEPPING.add(
        RuntimeError,
        f"1.weight was gathered in torch.bfloat16 before, but is now {_dtype}…"
        "only before its first forward",
        **{_case.__name__: _case},
    )
for _has_grad, _text in (
    (False, "Raised while reducing the gradients of 1.gain in torch.float32"),
    (True, "1.gain is torch.bfloat16 now, but its shard is torch.float32…cast a model"),
):
    STEPPING.add(
        RuntimeError, _text, **{f"data_is_cast_{_has_grad}": data_is_cast(_has_grad)}
    )

# Collectives #


# What a custom collective allocates
ALLOCATES: dict[str, Callable[..., Any]] = {
    "too_little": lambda n, **like: torch.empty(n - 1, **like),
    "too_much": lambda n, **like: torch.empty(n + 1, **like),
    "on_meta": lambda n, **like: torch.empty(n, **like | {"device": "meta"}),
    "doubles": lambda n, **like: torch.empty(n, **like | {"dtype": FP64}),
}
KINDS = {
    "set_custom_all_gather": DefaultAllGather,
    "set_custom_reduce_scatter": DefaultReduceScatter,
}


def allocating(setter: str, what: str) -> Case:
    """Of a step in which a custom collective allocates something else."""
    kind, allocate = KINDS[setter], ALLOCATES[what]

    class Custom(kind):  # type: ignore[misc, valid-type]
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return allocate(size[0], dtype=dtype, device=device)

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        set_comm = getattr(run.blocks[1], setter)
        set_comm(Custom())
        run.undo = lambda: set_comm(kind())
        return lambda: run.step(model)

    return case


for _setter, _names in (
    ("set_custom_all_gather", "doubles"),
    ("set_custom_reduce_scatter", "too_little too_much on_meta"),
):
    for _name in _names.split():
        STEPPING.add(
            ValueError,
            "Custom.allocate returned …: return …contiguous elements of ",
            **{f"{_setter}_allocates_{_name}": allocating(_setter, _name)},
        )


class Unable(DefaultReduceScatter):
    """Of a backend that has no all-to-all."""

    def exchange(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Backend mpi does not support alltoall_base")


def cannot_exchange(run: Run) -> Callable[[], object]:
    policy = MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64)
    model = run.model(mp_policy=policy)

    def set_all(kind: type) -> None:
        for block in run.blocks:
            block.set_custom_reduce_scatter(kind())

    set_all(Unable)
    run.undo = lambda: set_all(DefaultReduceScatter)
    return lambda: run.step(model)


STEPPING.add(
    RuntimeError,
    "Raised while reducing the gradients of …1.weight…in torch.float64. If the backend",
    backend_cannot_exchange=cannot_exchange,
)

# Extensions #


def extension(
    pre: Callable[[torch.Tensor], Any] = lambda whole: ((whole,), None),
    post: Callable[[torch.Tensor], Any] = lambda values: (values, (values,)),
) -> Case:
    """Of a first step with a tensor whose extension returns something else."""

    class Wrong(Extended):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return pre(self.whole_shard())

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None
        ) -> Any:
            return post(outputs[0]) if out is None else None

    def case(run: Run) -> Callable[[], object]:
        block = Scaled().to(run.device)
        block.gain = nn.Parameter(Wrong(block.gain.detach()))
        model = run.fully_shard(nn.Sequential(run.fully_shard(block)))
        return lambda: run.step(model)

    return case


PRE = "fsdp_pre_all_gather of 0.gain failed, or did not return "
POST = "fsdp_post_all_gather of 0.gain failed, or did not return "
STEPPING.add(
    TypeError,
    f"{PRE}((contiguous tensor, ...), metadata)",
    pre_all_gather_returns_none=extension(pre=lambda whole: None),
)
STEPPING.add(
    AttributeError,
    f"{PRE}((contiguous tensor, ...), metadata)",
    pre_all_gather_returns_numbers=extension(pre=lambda whole: ((1, 2), None)),
)
STEPPING.add(
    ValueError,
    f"{PRE}((contiguous tensor, ...), metadata)",
    pre_all_gather_returns_nothing=extension(pre=lambda whole: ((), None)),
    pre_all_gather_returns_meta=extension(
        pre=lambda whole: ((whole.to("meta"),), None)
    ),
)
for _case, _kind, _post in (
    ("none", TypeError, lambda values: None),
    ("too_little", RuntimeError, lambda values: (values[:1].clone(), (values,))),
    ("meta", ValueError, lambda values: (values.to("meta"), (values,))),
    ("nothing_to_free", TypeError, lambda values: (values, None)),
):
    STEPPING.add(
        _kind,
        f"{POST}(tensor, (tensor to free, ...))",
        **{f"post_all_gather_returns_{_case}": extension(post=_post)},
    )
