"""
The table of wrong uses that are found in training: what each raises, and how. What is
refused at once is in ``test_fully_shard_bad_input.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_helpers.common.comms import BF16, FP32, FP64
from fsdp_helpers.parity.models import Extended

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call


INT32 = torch.int32
# Divides by no number of ranks, so that one of 4 has no row
DIM = 6


class Scaled(nn.Module):
    """A bf16 matrix beside an fp32 gain."""

    def __init__(self, **extra: nn.Parameter) -> None:
        super().__init__()
        values = torch.arange(DIM * DIM, dtype=FP32).view(DIM, DIM) % 7 - 3
        self.weight = nn.Parameter(values.to(BF16))
        self.gain = nn.Parameter(torch.arange(DIM, dtype=FP32) - 2)
        for name, param in extra.items():
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).to(FP32) * self.gain


class OwnReduction(ReduceScatter):
    """Has no ``exchange``, which ``grad_comm_dtype`` needs."""

    allocate = DefaultReduceScatter.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return DefaultReduceScatter()(*args, **kwargs)


@dataclass
class Run:
    """One rank, on which one wrong use is tried."""

    device: torch.device
    mesh: DeviceMesh
    # Of what can go on: how to undo what was wrong, before `reset_iter_state`
    root: Any = None
    undo: Callable[[], object] | None = None
    blocks: list[Any] = field(default_factory=list)

    def fully_shard(self, module: Any, **kwargs: Any) -> Any:
        return fully_shard(module, **{"mesh": self.mesh, **kwargs})

    def model(self, **kwargs: Any) -> Any:
        """Returns two blocks, each a unit, in a root that is one as well."""
        self.blocks = [Scaled().to(self.device) for _ in range(2)]
        model = nn.Sequential(*self.blocks)
        for block in self.blocks:
            self.fully_shard(block, **kwargs)
        self.root = self.fully_shard(model, **kwargs)
        return self.root

    def trained(self, **kwargs: Any) -> Any:
        model = self.model(**kwargs)
        self.step(model)
        model.zero_grad()
        return model

    def input(self) -> torch.Tensor:
        x = torch.arange(2 * DIM, dtype=FP32, device=self.device).view(2, DIM) - 5
        return x.requires_grad_()

    def step(self, model: nn.Module) -> None:
        model(self.input()).sum().backward()

    def ones(self, *size: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.ones(size, device=self.device).to(dtype)

    def replicated(self) -> DTensor:
        values = self.ones(DIM)
        return DTensor.from_local(values, self.mesh, [Replicate()], run_check=False)


# Prepares what is needed, and returns the call that must raise
Case = Callable[[Run], Callable[[], object]]


class WrongUse(NamedTuple):
    kind: type[Exception]
    # How a line of the error or its notes begins, and what follows. "…" is anything
    text: str
    case: Case


class Errors(dict[str, WrongUse]):
    """What each case raises, by its name."""

    def add(self, kind: type[Exception], text: str, **cases: Case) -> None:
        for name, case in cases.items():
            self[name] = WrongUse(kind, text, case)


CASES = Errors()

# Found between `fully_shard` and the end of the first forward, or by a load #


def changed(change: Callable[[Run, Scaled], object]) -> Case:
    """Of a model whose second block is changed after `fully_shard`."""

    def case(run: Run) -> Callable[[], object]:
        model = run.model()
        change(run, run.blocks[1])
        return lambda: model(run.input())

    return case


def replaced(value: Callable[[Run], Any], *calls: str) -> Case:
    def change(run: Run, block: Scaled) -> None:
        for call in calls:
            getattr(block, call)()
        del block.gain
        block.gain = value(run)

    return changed(change)


def with_data(data: Callable[[Run, torch.Tensor], torch.Tensor]) -> Case:
    def change(run: Run, block: Scaled) -> None:
        block.gain.data = data(run, block.gain.data)

    return changed(change)


CASES.add(
    RuntimeError,
    "FSDP parameters should be materialized…['1.weight', '1.gain']…Call module.to_empty",
    on_meta=changed(lambda run, block: block.to("meta")),
)
CASES.add(
    RuntimeError,
    "1.gain is torch.float32 [… with a shard that is …Resize it before fully_shard",
    resized=with_data(lambda run, data: run.ones(7)),
    replicated=replaced(lambda run: nn.Parameter(run.replicated())),
)
CASES.add(
    RuntimeError,
    "1.gain is torch.bfloat16 [6] with a shard that is torch.float32…cast it by module",
    data_is_cast=with_data(lambda run, data: data.to(BF16)),
)
CASES.add(
    AttributeError,
    "1.gain must be the DTensor that fully_shard made of it…Replace or delete it before",
    plain_tensor_after_unshard=replaced(
        lambda run: run.ones(DIM), "unshard", "reshard"
    ),
    deleted=changed(lambda run, block: delattr(block, "gain")),
)


def functional_call_first(run: Run) -> Callable[[], object]:
    model = run.model()
    computed = {"1.gain": model[1].gain * 2}
    return lambda: functional_call(model, computed, (run.input(),))


CASES.add(
    RuntimeError,
    "1.gain is computed from other tensors…run a forward before a functional_call",
    functional_call_first=functional_call_first,
)
CASES.add(
    ValueError,
    "grad_dtype of 1.gain is torch.int32…set a floating-point dtype",
    integer_grad_dtype=changed(
        lambda run, block: setattr(block.gain, "grad_dtype", INT32)
    ),
)


# Found in a step #


def in_hook(change: Callable[[Run, nn.Parameter], object]) -> Case:
    """Of a step in which a hook changes a gradient of the second block."""

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


def hook_resizes(run: Run, param: nn.Parameter) -> None:
    param.grad.data = run.ones(9)


CASES.add(
    RuntimeError,
    "The gradient of 1.gain is a torch.…, not a dense tensor [6]: look for a hook or "
    "nn.Embedding(sparse=True)",
    gradient_of_another_size=in_hook(hook_resizes),
    sparse_gradient=hook_sets(lambda run: run.ones(DIM).to_sparse()),
    distributed_gradient=hook_sets(lambda run: run.replicated()),
)
CASES.add(
    RuntimeError,
    "Raised while reducing the gradients of 1.gain in torch.int32…set reduce_dtype to "
    "torch.float32",
    integer_gradient=hook_sets(lambda run: run.ones(DIM, dtype=INT32)),
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


CASES.add(
    AssertionError,
    "The gradient of 1.gain is a Tensor: set the gradient of a sharded parameter to a "
    "DTensor",
    plain_gradient_of_shard=on_sharded(lambda run, param: run.ones(DIM)),
)


def cast_between_steps(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.blocks[1].to(FP64)
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


CASES.add(
    RuntimeError,
    "1.weight was gathered in torch.bfloat16 before, but is now …only before its first "
    "forward",
    cast_between_steps=cast_between_steps,
)
CASES.add(
    RuntimeError,
    "Raised while reducing the gradients of 1.gain in torch.float32",
    whole_gradient_of_shard=on_sharded(lambda run, param: run.replicated()),
    data_is_cast_without_gradient=data_is_cast(False),
)
CASES.add(
    RuntimeError,
    "1.gain is torch.bfloat16 now, but its shard is torch.float32…cast a model",
    data_is_cast_with_gradient=data_is_cast(True),
)


def allocating(setter: str, kind: type, n: int = 0, **other: Any) -> Case:
    """Of a step in which a custom collective allocates ``n`` more, or something else."""

    class Custom(kind):  # type: ignore[misc, valid-type]
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            like = {"dtype": dtype, "device": device} | other
            return torch.empty(size[0] + n, **like)

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        set_comm = getattr(run.blocks[1], setter)
        set_comm(Custom())
        run.undo = lambda: set_comm(kind())
        return lambda: run.step(model)

    return case


_GATHER = "set_custom_all_gather", DefaultAllGather
_SCATTER = "set_custom_reduce_scatter", DefaultReduceScatter
CASES.add(
    ValueError,
    "Custom.allocate returned …: return …contiguous elements of ",
    all_gather_allocates_doubles=allocating(*_GATHER, dtype=FP64),
    reduce_scatter_allocates_too_little=allocating(*_SCATTER, n=-1),
    reduce_scatter_allocates_too_much=allocating(*_SCATTER, n=1),
    reduce_scatter_allocates_on_meta=allocating(*_SCATTER, device="meta"),
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


CASES.add(
    RuntimeError,
    "Raised while reducing the gradients of …1.weight…in torch.float64. If the backend",
    backend_cannot_exchange=cannot_exchange,
)


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


PRE = (
    "fsdp_pre_all_gather of 0.gain failed, or did not return ((contiguous tensor, ...), "
    "metadata)"
)
CASES.add(TypeError, PRE, pre_all_gather_returns_none=extension(lambda whole: None))
CASES.add(
    ValueError,
    PRE,
    pre_all_gather_returns_nothing=extension(lambda whole: ((), None)),
    pre_all_gather_returns_meta=extension(lambda whole: ((whole.to("meta"),), None)),
)
CASES.add(
    TypeError,
    "fsdp_post_all_gather of 0.gain failed, or did not return (tensor, (tensor to free, "
    "...))",
    post_all_gather_returns_none=extension(post=lambda values: None),
)
