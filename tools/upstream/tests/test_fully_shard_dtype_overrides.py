# Owner(s): ["oncall: distributed"]

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_fsdp import FSDPTestMultiThread, get_devtype
from torch.testing._internal.common_utils import run_tests


device_type = torch.device(get_devtype())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Of each part: the dtype that it is stored, computed and reduced in
PARTS = ((FP32, BF16, FP32), (BF16, FP32, BF16), (BF16, None, FP32), (FP32, FP16, None))


class Part(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(6, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.weight.dtype)
        y = torch.tanh(y @ self.weight.t()) @ self.weight
        return x + (y * self.scale).to(x.dtype)


def make_model() -> nn.Sequential:
    model = nn.Sequential(*(Part(dtype) for dtype, _, _ in PARTS))
    generator = torch.Generator().manual_seed(42)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.3)
    return model.to(device_type)


def shard_whole(model: nn.Sequential, **kwargs) -> FSDPModule:
    """Makes one group of all parts."""
    dtypes = {
        id(param): part_dtypes[1:]
        for part, part_dtypes in zip(model, PARTS)
        for param in part.parameters()
    }
    mp_policy = MixedPrecisionPolicy(
        param_dtype_override_fn=lambda p: dtypes[id(p)][0],
        reduce_dtype_override_fn=lambda p: dtypes[id(p)][1],
    )
    return fully_shard(model, mp_policy=mp_policy, **kwargs)


def shard_parts(model: nn.Sequential, **kwargs) -> FSDPModule:
    """Makes each part a group, of a policy of its own."""
    for part, (_, param_dtype, reduce_dtype) in zip(model, PARTS):
        mp_policy = MixedPrecisionPolicy(
            param_dtype, reduce_dtype, cast_forward_inputs=False
        )
        fully_shard(part, mp_policy=mp_policy, **kwargs)
    return fully_shard(model, **kwargs)


def run_backward(model: FSDPModule, step: int, microbatch: int = 0) -> None:
    seed = 1 + dist.get_rank() + 10 * step + 100 * microbatch
    inp = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(inp.to(device_type)).square().mean().backward()


def accumulate(model: FSDPModule, step: int) -> None:
    for microbatch in range(2):
        model.set_requires_gradient_sync(microbatch == 1)
        run_backward(model, step, microbatch)


def defer_all_reduce(model: FSDPModule, step: int) -> None:
    for microbatch in range(2):
        model.set_requires_all_reduce(microbatch == 1)
        run_backward(model, step, microbatch)


class TestDtypeOverrides(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 4

    def test_equals_one_group_for_each_policy(self):
        self.run_subtests(
            {
                "step": [run_backward, accumulate, defer_all_reduce],
                "is_hybrid": [False, True],
            },
            self._test_equals_one_group_for_each_policy,
        )

    def _test_equals_one_group_for_each_policy(
        self, step: Callable[[FSDPModule, int], None], is_hybrid: bool
    ):
        shape, names = ((2, 2), ("replicate", "shard")) if is_hybrid else ((4,), None)
        mesh = init_device_mesh(device_type.type, shape, mesh_dim_names=names)
        ref_model = shard_parts(make_model(), mesh=mesh)
        model = shard_whole(make_model(), mesh=mesh)
        for i in range(2):
            step(ref_model, i)
            step(model, i)
            named = zip(model.named_parameters(), ref_model.parameters())
            for (name, param), ref_param in named:
                grads = [p.grad.to_local() for p in (param, ref_param)]
                self.assertEqual(*grads, atol=0, rtol=0, msg=name)
                self.assertEqual(param.grad.dtype, param.dtype)
                param.grad = ref_param.grad = None

    def test_unsharded_dtypes(self):
        mesh = init_device_mesh(device_type.type, (self.world_size,))
        model = shard_whole(make_model(), mesh=mesh)
        model.unshard()
        for part, (stored, param_dtype, _) in zip(model, PARTS):
            self.assertEqual(part.weight.dtype, param_dtype or stored)
            self.assertEqual(part.scale.dtype, param_dtype or stored)

    def test_other_dtypes_are_refused(self):
        mesh = init_device_mesh(device_type.type, (self.world_size,))
        for fn in ("param_dtype_override_fn", "reduce_dtype_override_fn"):
            for dtype in (torch.int8, "bfloat16"):
                mp_policy = MixedPrecisionPolicy(**{fn: lambda _, dtype=dtype: dtype})
                with self.assertRaisesRegex(ValueError, f"{fn} must return"):
                    fully_shard(make_model(), mesh=mesh, mp_policy=mp_policy)
        mp_policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda _: torch.int8)
        with self.assertRaises(ValueError) as raised:
            fully_shard(make_model(), mesh=mesh, mp_policy=mp_policy)
        self.assertExpectedInline(
            str(raised.exception),
            """\
param_dtype_override_fn must return None, a floating-point dtype, or the parameter's \
original dtype but got torch.int8 for a parameter with dtype torch.float32 and \
param_dtype None""",
        )


if __name__ == "__main__":
    run_tests()
