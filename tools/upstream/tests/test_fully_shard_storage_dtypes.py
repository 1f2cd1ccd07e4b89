# Owner(s): ["oncall: distributed"]

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import (
    FSDPTest,
    FSDPTestMultiThread,
    get_devtype,
)
from torch.testing._internal.common_utils import run_tests


device_type = torch.device(get_devtype())


class Scale(nn.Module):
    def __init__(self, dim: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.weight.dtype) * self.weight


class Block(nn.Module):
    """Holds parameters of three dtypes, of sizes that ranks do not share evenly."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = Scale(dim, torch.float32)
        self.up = nn.Linear(dim, dim + 1, dtype=torch.bfloat16)
        self.down = nn.Linear(dim + 1, dim, bias=False, dtype=torch.bfloat16)
        self.gate = Scale(dim, torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x).bfloat16())))
        return x + self.gate(y).to(x.dtype)


class WeightedSum(nn.Module):
    """Gives each parameter a gradient that is the same in all of its elements."""

    def __init__(self, grads: dict[torch.dtype, float]):
        super().__init__()
        self.grads = grads
        self.params = nn.ParameterList(
            nn.Parameter(torch.ones(5, dtype=dtype, device=device_type))
            for dtype in grads
        )

    def forward(self, factor: float) -> torch.Tensor:
        return sum(
            (param.float() * (self.grads[param.dtype] * factor)).sum()
            for param in self.params
        )


def make_model(dim: int = 6) -> nn.Module:
    model = nn.Sequential(*(Block(dim) for _ in range(3)))
    # Threads share the default generator
    generator = torch.Generator().manual_seed(42)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.3)
    return model


def shard(model: nn.Module, **kwargs) -> FSDPModule:
    for block in model:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def hybrid_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh(
        device_type.type,
        (2, world_size // 2),
        mesh_dim_names=("replicate", "shard"),
    )


def train_beside_reference(
    test: FSDPTest | FSDPTestMultiThread,
    *,
    num_microbatches: int = 1,
    **kwargs,
) -> None:
    """Compares each step with a replicated model, whose gradients are averaged."""
    ref_model = make_model().to(device_type)
    model = copy.deepcopy(ref_model)
    shard(model, **kwargs)
    ref_optim = torch.optim.SGD(ref_model.parameters(), lr=0.1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for microbatch in range(num_microbatches):
            inp = torch.randn(4, 6, generator=generator).to(device_type)
            model.set_requires_gradient_sync(microbatch == num_microbatches - 1)
            losses = [m(inp).square().mean() for m in (ref_model, model)]
            for loss in losses:
                loss.backward()
            test.assertEqual(losses[0], losses[1])
        for ref_param, param in zip(ref_model.parameters(), model.parameters()):
            grad = ref_param.grad.float()
            dist.all_reduce(grad)
            ref_param.grad = (grad / dist.get_world_size()).to(ref_param.dtype)
            test.assertEqual(param.dtype, ref_param.dtype)
            # The dtypes of sums may differ, e.g. where microbatches accumulate
            test.assertEqual(
                param.grad.full_tensor(), ref_param.grad, atol=2e-3, rtol=2e-2
            )
        for opt in (ref_optim, optim):
            opt.step()
            opt.zero_grad()
        # Compare the next step alone
        with torch.no_grad():
            for ref_param, param in zip(ref_model.parameters(), model.parameters()):
                ref_param.copy_(param.full_tensor())


class TestStorageDtypesComm(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 8

    def test_reduced_gradients_are_the_plain_mean(self):
        self.run_subtests(
            {
                "mesh_shape": [(8,), (2, 4), (4, 2)],
                "divide_factor": [None, 2.0, 6.0],
                "reduce_dtype": [None, torch.float32],
            },
            self._test_reduced_gradients_are_the_plain_mean,
        )

    def _test_reduced_gradients_are_the_plain_mean(
        self,
        mesh_shape: tuple[int, ...],
        divide_factor: float | None,
        reduce_dtype: torch.dtype | None,
    ):
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh(device_type.type, mesh_shape, mesh_dim_names=names)
        # Sums of these are exact, but 8 of the last overflow in their dtype
        grads = {torch.bfloat16: 3.0, torch.float32: 1e5, torch.float16: 30000.0}
        module = WeightedSum(grads)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if divide_factor is not None:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(divide_factor)
        module(dist.get_rank() % 2).backward()
        for param in module.parameters():
            # Half of the ranks have a gradient of 0
            want = grads[param.dtype] * self.world_size / 2
            want /= self.world_size if divide_factor is None else divide_factor
            grad = param.grad.full_tensor()
            self.assertEqual(grad.dtype, param.dtype)
            self.assertEqual(grad, torch.full_like(grad, want))


class TestStorageDtypesTraining(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 4

    def test_train_parity(self):
        self.run_subtests(
            {
                "is_hybrid": [False, True],
                "reshard_after_forward": [True, 2],
                "reduce_dtype": [None, torch.float32],
                "num_microbatches": [1, 2],
            },
            self._test_train_parity,
        )

    def _test_train_parity(
        self,
        is_hybrid: bool,
        reshard_after_forward: bool | int,
        reduce_dtype: torch.dtype | None,
        num_microbatches: int,
    ):
        if is_hybrid and reshard_after_forward == 2:
            return  # as many as there are shards
        flat_mesh = init_device_mesh(device_type.type, (self.world_size,))
        train_beside_reference(
            self,
            num_microbatches=num_microbatches,
            mesh=hybrid_mesh(self.world_size) if is_hybrid else flat_mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )

    def test_frozen_and_unfrozen_parameters(self):
        model = make_model().to(device_type)
        for block in model:
            block.up.requires_grad_(False)
        model = shard(model, mesh=init_device_mesh(device_type.type, (4,)))
        inp = torch.randn(4, 6, device=device_type)
        for _ in range(2):
            model(inp).square().mean().backward()
            for name, param in model.named_parameters():
                self.assertEqual(param.grad is None, not param.requires_grad, name)
                param.grad = None
            for block in model:
                block.up.requires_grad_(True)


class TestStorageDtypesProcesses(FSDPTest):
    @property
    def world_size(self) -> int:
        return min(4, torch.accelerator.device_count())

    @skip_if_lt_x_gpu(2)
    def test_train_parity(self):
        train_beside_reference(self)


if __name__ == "__main__":
    run_tests()
