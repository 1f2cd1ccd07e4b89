# Owner(s): ["oncall: distributed"]
"""Wrong uses raise clear errors on every rank, and training goes on after it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from fsdp_helpers.common.comms import BF16, FP32, FP64, OwnReduction
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.utils import FSDPProcessTest, shard_blocks, shard_mesh
from fsdp_helpers.parity.models import Extended

import torch
import torch._dynamo
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase


pytestmark = pytest.mark.timeout(600)

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


@dataclass
class Run:
    """One rank, on which one wrong use is tried."""

    device: torch.device
    # Where training can go on: undoes what was wrong, before `reset_iter_state`
    root: Any = None
    undo: Callable[[], object] | None = None
    blocks: list[Any] = field(default_factory=list)

    def model(self, **kwargs: Any) -> Any:
        """Returns two blocks, each a unit, in a root that is one as well."""
        self.blocks = [Scaled().to(self.device) for _ in range(2)]
        model = nn.Sequential(*self.blocks)
        self.root = shard_blocks(model, mesh=shard_mesh(), **kwargs)
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
        values, mesh = self.ones(DIM), shard_mesh()
        return DTensor.from_local(values, mesh, [Replicate()], run_check=False)


# Prepares what is needed, and returns the call that must raise
WrongUse = Callable[[Run], Callable[[], object]]
# With the type of the error, how a line of it or of its notes begins, and what follows:
# "…" is anything
WRONG_USES: dict[str, tuple[str, WrongUse]] = {}


def add(text: str, **wrong_uses: WrongUse) -> None:
    WRONG_USES.update({name: (text, use) for name, use in wrong_uses.items()})


# Refused at once, by `fully_shard` and by setters, before anything has changed #


def sharding(
    module: Callable[[Run], nn.Module] = lambda run: Scaled(), **kwargs: Any
) -> WrongUse:
    def case(run: Run) -> Callable[[], object]:
        return partial(fully_shard, module(run), mesh=shard_mesh(), **kwargs)

    return case


def with_other(data: Callable[[Run], torch.Tensor]) -> WrongUse:
    return sharding(lambda run: Scaled(other=nn.Parameter(data(run), False)))


class CannotSplit(Extended):
    """As torchao's weights for inference."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError(f"no {func}")
        return super().__torch_dispatch__(func, *args)


# Since 2.15 a unit's state copies the policy
OTHER_POLICY = "mp_policy of unit 'Scaled' got …pass a MixedPrecisionPolicy"
if IS_2_15:
    OTHER_POLICY = "replace() should be called on dataclass instances"
add(f"TypeError: {OTHER_POLICY}", policy_of_another_type=sharding(mp_policy=None))
add(
    "TypeError: offload_policy of unit 'Scaled' got …pass CPUOffloadPolicy()",
    offload_policy_that_is_a_class=sharding(offload_policy=fsdp.CPUOffloadPolicy),
)
add(
    "ValueError: FSDPSequential is a unit already: call by_name before",
    policy_of_a_unit=lambda run: partial(MixedPrecisionPolicy.by_name, run.model(), {}),
)
WEIGHT, OTHER = (
    f"Parameter {name} of unit 'Scaled' cannot be sharded."
    for name in ("weight", "other")
)
add(
    f"NotImplementedError: FSDP does not support non-contig…{OTHER}",
    strided=with_other(lambda run: torch.ones(6, 6).t()[:, :4]),
)
add(
    f"NotImplementedError: {OTHER} Implement …, or put it in ignored_params",
    no_split=with_other(lambda run: CannotSplit(torch.ones(6, 6))),
)
add(
    f"AssertionError: …dim…{WEIGHT}",
    no_such_dim=sharding(shard_placement_fn=lambda p: Shard(2) if p.ndim > 1 else None),
)
add(
    f"ValueError: …DTensors on the full SPMD mesh…{WEIGHT}",
    mesh_dims_of_tensors=sharding(dp_mesh_dims=fsdp.DataParallelMeshDims("shard")),
)
add(
    f"RuntimeError: {OTHER} It is a DTensor. Call …named mesh dims other",
    distributed_already=with_other(lambda run: run.replicated()),
)


def setting(setter: str, value: Any) -> WrongUse:
    """Sets it on the second block, whose unit sends gradients in another way."""

    def case(run: Run) -> Callable[[], object]:
        policy = MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64)
        run.trained(mp_policy=policy)
        return partial(getattr(run.blocks[1], setter), value)

    return case


class Uncallable:
    allocate = DefaultAllGather.allocate


for setter, values in {
    "set_custom_all_gather": (DefaultAllGather, Uncallable(), DefaultReduceScatter()),
    "set_custom_reduce_scatter": (DefaultAllGather(),),
    "set_gradient_divide_factor": (0, float("nan"), "2", torch.ones(2)),
}.items():
    for i, value in enumerate(values):
        kind = "ValueError" if isinstance(value, int | float) else "TypeError"
        wrong = {f"{setter}_{i}": setting(setter, value)}
        add(f"{kind}: {setter} of unit '1' got …pass a", **wrong)
add(
    "ValueError: OwnReduction of unit '1' cannot reduce 1.weight, whose grad_comm_dtype "
    "…add exchange(output_tensor, input_tensor, group)",
    no_exchange=setting("set_custom_reduce_scatter", OwnReduction()),
)


def capping(bucket_cap_mb: Any) -> WrongUse:
    return lambda run: partial(fsdp.set_reduce_bucket_cap, run.model(), bucket_cap_mb)


CAPS = {f"bucket_cap_{i}": capping(cap) for i, cap in enumerate((0, float("inf"), "1"))}
add("ValueError: bucket_cap_mb=…small_kb=…must be finite and > 0", **CAPS)


# Found between `fully_shard` and the end of the first forward, or by a load #


def changed(change: Callable[[Run, Scaled], object]) -> WrongUse:
    """Changes the second block after `fully_shard`."""

    def case(run: Run) -> Callable[[], object]:
        model = run.model()
        change(run, run.blocks[1])
        return lambda: model(run.input())

    return case


def with_data(data: Callable[[Run, torch.Tensor], torch.Tensor]) -> WrongUse:
    def change(run: Run, block: Scaled) -> None:
        block.gain.data = data(run, block.gain.data)

    return changed(change)


def replaced_after_unshard(run: Run, block: Any) -> None:
    block.unshard()
    block.reshard()
    del block.gain
    block.gain = run.ones(DIM)


def functional_call_first(run: Run) -> Callable[[], object]:
    model = run.model()
    computed = {"1.gain": model[1].gain * 2}
    return partial(functional_call, model, computed, (run.input(),))


add(
    "RuntimeError: FSDP parameters should be …['1.weight', '1.gain']…Call module.to_empty",
    on_meta=changed(lambda run, block: block.to("meta")),
)
add(
    "RuntimeError: 1.gain is torch.float32 [… with a shard …Resize it before fully",
    resized=with_data(lambda run, data: run.ones(7)),
)
add(
    "RuntimeError: 1.gain is torch.bfloat16 [6] with a shard …cast it by module",
    data_is_cast=with_data(lambda run, data: data.to(BF16)),
)
add(
    "RuntimeError: 1.gain must be the DTensor that …Replace or delete it before",
    plain_tensor_after_unshard=changed(replaced_after_unshard),
)
add(
    "RuntimeError: 1.gain is computed from …run a forward before a functional_call",
    functional_call_first=functional_call_first,
)
add(
    "ValueError: grad_dtype of 1.gain is torch.int32…set a floating-point dtype",
    integer_grad_dtype=changed(lambda _, b: setattr(b.gain, "grad_dtype", INT32)),
)


# Found in a step #


def hook_sets(grad: Callable[[Run, torch.Tensor], torch.Tensor]) -> WrongUse:
    """Has a hook replace a gradient of the second block."""

    def case(run: Run) -> Callable[[], object]:
        loss = run.trained(reshard_after_forward=False)(run.input()).sum()
        param = run.blocks[1].gain

        def change(p: nn.Parameter) -> None:
            new, p.grad = grad(run, p.grad), None
            p.grad = new

        handle = param.register_post_accumulate_grad_hook(change)
        param.grad_dtype = None

        def undo() -> None:
            handle.remove()
            param.grad_dtype = param.dtype

        run.undo = undo
        return loss.backward

    return case


NOT_DENSE = (
    "Error: The gradient of 1.gain is a torch.…, not a dense tensor [6]: …sparse=T"
)
add(
    f"NotImplemented{NOT_DENSE}",
    sparse_gradient=hook_sets(lambda run, grad: grad.to_sparse()),
)
add(
    f"Runtime{NOT_DENSE}",
    distributed_gradient=hook_sets(lambda run, grad: run.replicated()),
)
add(
    "RuntimeError: Raised while reducing …1.gain in torch.int32…set reduce_dtype to torch.fl",
    integer_gradient=hook_sets(lambda run, grad: grad.to(INT32)),
)


def plain_gradient_of_shard(run: Run) -> Callable[[], object]:
    model = run.trained()
    param = run.blocks[1].gain
    param.grad_dtype = None
    param.grad = run.ones(DIM)

    def undo() -> None:
        param.grad = None
        param.grad_dtype = param.dtype

    run.undo = undo
    return lambda: run.step(model)


def cast_between_steps(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.blocks[1].to(FP64)
    return lambda: model(run.input())


def data_is_cast_with_gradient(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.step(model)
    gain = run.blocks[1].gain
    gain.data = gain.data.to(BF16)
    return lambda: run.step(model)


add(
    "AssertionError: The gradient of 1.gain is a Tensor: set …to a DTensor",
    plain_gradient_of_shard=plain_gradient_of_shard,
)
add(
    "RuntimeError: 1.weight was gathered in torch.bfloat16 before, …only before the first",
    cast_between_steps=cast_between_steps,
)
add(
    "RuntimeError: 1.gain is torch.bfloat16 now, …torch.float32…cast a model",
    data_is_cast_with_gradient=data_is_cast_with_gradient,
)


def custom(kind: type, n: int = 0, **other: Any) -> Any:
    """Returns a collective that allocates ``n`` more, or something else."""

    class Custom(kind):  # type: ignore[misc, valid-type]
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            like = {"dtype": dtype, "device": device} | other
            return torch.empty(size[0] + n, **like)

    return Custom()


def allocating(setter: str, kind: type, *args: Any, **kwargs: Any) -> WrongUse:
    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        set_comm = getattr(run.blocks[1], setter)
        set_comm(custom(kind, *args, **kwargs))
        run.undo = lambda: set_comm(kind())
        return lambda: run.step(model)

    return case


_GATHER = "set_custom_all_gather", DefaultAllGather
_SCATTER = "set_custom_reduce_scatter", DefaultReduceScatter
add(
    "ValueError: Custom.allocate returned …: return …contiguous elements of ",
    all_gather_allocates_doubles=allocating(*_GATHER, dtype=FP64),
    reduce_scatter_allocates_too_little=allocating(*_SCATTER, n=-1),
    reduce_scatter_allocates_too_much=allocating(*_SCATTER, n=1),
    reduce_scatter_allocates_on_meta=allocating(*_SCATTER, device="meta"),
)


def extension(
    pre: Callable[[torch.Tensor], Any] = lambda whole: ((whole,), None),
    post: Callable[[torch.Tensor], Any] = lambda values: (values, (values,)),
) -> WrongUse:
    """Has the extension of a tensor return something else in the first step."""

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
        model = shard_blocks(nn.Sequential(block), mesh=shard_mesh())
        return lambda: run.step(model)

    return case


add(
    "ValueError: fsdp_pre_all_gather of 0.gain …did not return ((contiguous tensor, …",
    pre_all_gather_returns_nothing=extension(lambda whole: ((), None)),
    pre_all_gather_returns_meta=extension(lambda whole: ((whole.to("meta"),), None)),
)
add(
    "TypeError: fsdp_post_all_gather of 0.gain …did not return (tensor, (tensor to free",
    post_all_gather_returns_none=extension(post=lambda values: None),
)


def expected_grads(device: torch.device) -> list[torch.Tensor]:
    """Returns those of a run in one process. All ranks have the same input."""
    model = nn.Sequential(Scaled(), Scaled()).to(device)
    model(Run(device).input()).sum().backward()
    return [param.grad for param in model.parameters()]


def check_text(test: TestCase, error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        found = "\n".join([str(error), *getattr(error, "__notes__", ())])
        pattern = ".*".join(re.escape(part.strip()) for part in text.split("…"))
        test.assertRegex(found, f"(?ms)^{pattern}")


class TestBadInput(FSDPProcessTest):
    """Ranks of which the last has no row."""

    def check_step(self, run: Run, model: nn.Module, times: float = 1) -> None:
        run.step(model)
        grads = [param.grad.full_tensor() for param in model.parameters()]
        for grad, expected in zip(grads, expected_grads(run.device), strict=True):
            self.assertEqual(grad, expected * times, atol=0, rtol=0)
            self.assertEqual(grad.dtype, expected.dtype)

    @parametrize("name", WRONG_USES)
    def test_wrong_use_is_refused_and_training_goes_on(self, name: str) -> None:
        (text, wrong_use), run = WRONG_USES[name], Run(self.device)
        kind, _, expected = text.partition(": ")
        call = wrong_use(run)
        with self.assertRaises(Exception) as caught:
            call()
        self.assertEqual(type(caught.exception).__name__, kind, caught.exception)
        check_text(self, caught.exception, expected)
        if run.undo is None:
            run.model()
        else:
            run.undo()
            run.root.reset_iter_state()
            run.root.zero_grad()
        self.check_step(run, run.root)

    @parametrize(
        "factor",
        [-1, torch.tensor(2.0), True, None, 0.5],
        name_fn=lambda factor: type(factor).__name__,
    )
    def test_factors_of_any_sign_and_kind(self, factor: Any) -> None:
        run = Run(self.device)
        model = run.model(offload_policy=None)
        run.blocks[0].set_all_reduce_hook(None)
        for last in (4.0, factor):
            for block in run.blocks:
                block.set_gradient_divide_factor(last)
            by = self.world_size if last is None else float(last)
            self.check_step(run, model, self.world_size / by)
            model.zero_grad()

    def test_reduce_buffers_may_be_wider(self) -> None:
        run = Run(self.device)
        model = run.model()
        wider = custom(DefaultReduceScatter, dtype=FP64)
        run.blocks[1].set_custom_reduce_scatter(wider)
        self.check_step(run, model)

    @parametrize("is_sharded", [True, False])
    def test_casts_after_a_forward_are_found_where_nothing_is_gathered(
        self, is_sharded: bool
    ) -> None:
        apply, *shards = (fully_shard, 1) if is_sharded else (replicate,)
        model = apply(Scaled().to(self.device), mesh=shard_mesh(*shards))
        x = torch.ones(1, DIM, device=self.device)
        model(x).sum().backward()
        model.half()
        text = "weight was gathered in torch.bfloat16 before, but is now torch.fl"
        with self.assertRaisesRegex(RuntimeError, text):
            model(x)


if __name__ == "__main__":
    run_tests()
