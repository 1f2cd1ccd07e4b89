# Owner(s): ["oncall: distributed"]

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.testing._internal.common_fsdp import FSDPTestMultiThread, get_devtype
from torch.testing._internal.common_utils import run_tests


device_type = torch.device(get_devtype())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Part(nn.Module):
    """Parameters of one dtype, of sizes that ranks do not share evenly."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(6, dtype=dtype))
        self.uses_scale = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.weight.dtype)
        y = torch.tanh(y @ self.weight.t()) @ self.weight
        return x + (y * self.scale if self.uses_scale else y).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dtypes: tuple[torch.dtype, ...] = (BF16, FP32, FP16)):
        super().__init__()
        self.parts = nn.ModuleList(Part(dtype) for dtype in dtypes)
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            if i not in self.skipped:
                x = part(x)
        return x


def make_model(block: Callable[[], Block] = Block) -> nn.Module:
    model = nn.Sequential(block(), block())
    # Threads share the default generator
    generator = torch.Generator().manual_seed(42)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.3)
    return model.to(device_type)


def shard(model: nn.Module, *units: type[nn.Module], **kwargs) -> FSDPModule:
    for module in [*model.modules()]:
        if isinstance(module, units):
            fully_shard(module, **kwargs)
    return fully_shard(model, **kwargs)


class RecordedReduceScatter(DefaultReduceScatter):
    """Notes what it reduces."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dtype = str(input_tensor.dtype).removeprefix("torch.")
        numel, op_name = input_tensor.numel(), str(op).split(".")[-1]
        self.calls.append(f"reduce-scatter {numel} {dtype} {op_name}")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def record_reductions(model: nn.Module) -> list[str]:
    calls: list[str] = []

    def all_reduce_hook(reduce_output: torch.Tensor) -> None:
        dtype = str(reduce_output.dtype).removeprefix("torch.")
        calls.append(f"hook {reduce_output.numel()} {dtype}")

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RecordedReduceScatter(calls))
            module.set_all_reduce_hook(all_reduce_hook)
    return calls


# One step each, up to the gradients #


def batch(*key: int) -> torch.Tensor:
    seed = sum(1000**i * part for i, part in enumerate(key))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator).to(device_type)


def run_backward(model: FSDPModule, step: int, microbatch: int = 0) -> None:
    inp = batch(dist.get_rank(), step, microbatch)
    model(inp).float().square().mean().backward()


def accumulate(model: FSDPModule, step: int) -> None:
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        run_backward(model, step, microbatch)


def defer_all_reduce(model: FSDPModule, step: int) -> None:
    for microbatch in range(3):
        model.set_requires_all_reduce(microbatch == 2)
        run_backward(model, step, microbatch)


def defer_all_reduce_of_others(model: FSDPModule, step: int) -> None:
    """Gives other parameters a gradient in each microbatch, but for the first step."""
    for microbatch, skipped in enumerate(((0,), (1, 2), (2,))):
        for block in model:
            block.skipped = skipped if step > 0 else ()
        model.set_requires_all_reduce(microbatch == 2)
        run_backward(model, step, microbatch)


def leave_unused(model: FSDPModule, step: int) -> None:
    """Uses other parameters on each rank."""
    model.set_reduce_scatter_unused_params(True)
    for block in model:
        for i, part in enumerate(block.parts):
            part.uses_scale = (dist.get_rank() + step + i) % 2 == 0
    run_backward(model, step)


class Widened(torch.autograd.Function):
    """Has a wider gradient than input."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def defer_all_reduce_of_other_dtypes(model: FSDPModule, step: int) -> None:
    """Gives parameters that take any gradient one of fp32, and then one of their own."""
    for microbatch in range(2):
        model.set_requires_all_reduce(microbatch == 1)
        for block in model:
            for part in block.parts:
                part.widens = microbatch == 0
        run_backward(model, step, microbatch)


class AnyGradPart(Part):
    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype)
        self.weight.grad_dtype = None
        self.widens = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.widens:
            return x + Widened.apply(self.weight).sum() * x.float().sum().to(x.dtype)
        return super().forward(x)


class AnyGradBlock(Block):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(AnyGradPart(dtype) for dtype in (BF16, FP32, FP16))


class TestReduceDtypes(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 4

    def mesh(self, is_hybrid: bool):
        shape, names = ((2, 2), ("replicate", "shard")) if is_hybrid else ((4,), None)
        return init_device_mesh(device_type.type, shape, mesh_dim_names=names)

    def test_one_reduction_for_each_dtype(self):
        mesh = self.mesh(is_hybrid=True)
        model = shard(make_model(), mesh=mesh)
        calls = record_reductions(model)
        for _ in range(2):
            calls.clear()
            run_backward(model, 0)
        # The divide factors of fp16 are its own: it is summed
        self.assertExpectedInline(
            "\n".join(calls),
            """\
reduce-scatter 84 bfloat16 AVG
hook 42 bfloat16
reduce-scatter 84 float32 AVG
hook 42 float32
reduce-scatter 84 float16 SUM
hook 42 float16""",
        )

    def test_one_reduction_in_the_reduce_dtype(self):
        mp_policy = MixedPrecisionPolicy(reduce_dtype=FP32)
        mesh = self.mesh(is_hybrid=False)
        model = shard(make_model(), mesh=mesh, mp_policy=mp_policy)
        calls = record_reductions(model)
        run_backward(model, 0)
        self.assertExpectedInline(
            "\n".join(calls), "reduce-scatter 336 float32 AVG\nhook 84 float32"
        )

    def test_one_storage_dtype_is_reduced_once(self):
        model = make_model(lambda: Block((BF16, BF16)))
        for block in model:
            block.parts[1].scale.grad_dtype = FP32
        model = shard(model, Block, mesh=self.mesh(is_hybrid=False))
        calls = record_reductions(model)
        run_backward(model, 0)
        # Promoted within the storage dtype
        self.assertEqual(
            calls, ["reduce-scatter 112 float32 AVG", "hook 28 float32"] * 2
        )

    def test_equals_one_group_for_each_dtype(self):
        self.run_subtests(
            {
                "step": [run_backward, accumulate, leave_unused],
                "is_hybrid": [False, True],
                "param_dtype": [None, BF16],
                "reduce_dtype": [None, FP32],
            },
            self._test_equals_one_group_for_each_dtype,
        )

    def test_deferred_all_reduce_equals_one_group_for_each_dtype(self):
        self.run_subtests(
            {
                "step": [defer_all_reduce, defer_all_reduce_of_others],
                "is_hybrid": [True],
                "param_dtype": [None, BF16],
                "reduce_dtype": [None, FP32],
            },
            self._test_equals_one_group_for_each_dtype,
        )

    def test_divide_factor_equals_one_group_for_each_dtype(self):
        self.run_subtests(
            {
                "step": [run_backward],
                "is_hybrid": [False, True],
                "param_dtype": [None],
                "reduce_dtype": [None],
                "divide_factor": [6.0],
            },
            self._test_equals_one_group_for_each_dtype,
        )

    def test_any_grad_dtype_equals_one_group_for_each_dtype(self):
        self._test_equals_one_group_for_each_dtype(
            defer_all_reduce_of_other_dtypes, True, None, None, block=AnyGradBlock
        )

    def _test_equals_one_group_for_each_dtype(
        self,
        step: Callable[[FSDPModule, int], None],
        is_hybrid: bool,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        divide_factor: float | None = None,
        block: type[Block] = Block,
    ):
        kwargs = {
            "mesh": self.mesh(is_hybrid),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype, reduce_dtype, cast_forward_inputs=False
            ),
        }
        ref_model = shard(make_model(block), Part, **kwargs)
        model = shard(make_model(block), Block, **kwargs)
        models = (ref_model, model)
        if divide_factor is not None:
            for module in (module for model in models for module in model.modules()):
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(divide_factor)
        for i in range(3):
            for each in models:
                step(each, i)
            named = zip(model.named_parameters(), ref_model.parameters())
            for (name, param), ref_param in named:
                self.assertEqual(param.grad is None, ref_param.grad is None, name)
                if param.grad is not None:
                    grads = [p.grad.to_local() for p in (param, ref_param)]
                    self.assertEqual(*grads, atol=0, rtol=0, msg=name)
                param.grad = ref_param.grad = None

    def test_max_input_buffers_counts_groups(self):
        model = make_model()
        model.append(Block().to(device_type))
        model = shard(model, Block, mesh=self.mesh(is_hybrid=False))
        model.set_reduce_scatter_max_input_buffers(2)
        comm_ctx = model._get_fsdp_state()._comm_ctx
        numbers: list[list[int]] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(
                    lambda _: numbers.append(
                        [
                            len(s.reduce_scatter_inputs)
                            for s in comm_ctx.reduce_scatter_states
                        ]
                    )
                )
        run_backward(model, 0)
        # While each group reduces, those of one before it are kept
        self.assertEqual(numbers, [[]] * 3 + [[3]] * 3 + [[3]] * 3)

    def test_finalization_by_hand_refuses_partial_sums(self):
        model = shard(make_model(), Block, mesh=self.mesh(is_hybrid=True))
        model.set_requires_all_reduce(False)
        run_backward(model, 0)
        model.set_requires_all_reduce(True)
        model.set_manual_backward_finalization(True)
        run_backward(model, 0)
        with self.assertRaisesRegex(RuntimeError, "partial gradient reductions"):
            model.finalize_backward()
        model.reset_iter_state()
        run_backward(model, 0)
        model.finalize_backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        fresh = shard(make_model(), Block, mesh=self.mesh(is_hybrid=True))
        run_backward(fresh, 0)
        self.assertEqual(grads, [param.grad.to_local() for param in fresh.parameters()])


if __name__ == "__main__":
    run_tests()
