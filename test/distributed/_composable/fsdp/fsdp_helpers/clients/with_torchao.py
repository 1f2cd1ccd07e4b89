# Owner(s): ["oncall: distributed"]
"""
torchao's 8-bit gathers, in one unit with bf16 and fp32 weights. A CPU has no products
of float8: torchao's ``emulate`` computes them in fp32.
"""

from typing import Any

from fsdp_helpers.clients.common import ClientTest
from fsdp_helpers.clients.real_models import make_mesh, OneProcess
from fsdp_helpers.common.utils import record_collectives

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import parametrize, run_tests


BF16, FP32 = torch.bfloat16, torch.float32
DIM = 32


class Block(nn.Module):
    """Has a weight that becomes 8 bits wide, a bf16 one and an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.narrow = nn.Linear(DIM, 2 * DIM, bias=False, dtype=BF16)
        self.plain = nn.Linear(2 * DIM, DIM, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.float()).to(x.dtype)
        return x + self.plain(self.narrow(normed).relu())


def to_float8(model: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training, Float8LinearConfig

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "narrow" in name
    )


def to_int8(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    config = int8_weight_only_quantized_training()
    quantize_(model, config, filter_fn=lambda _, name: "narrow" in name)


NARROW = {"float8": to_float8, "int8": to_int8}


def build(narrow: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    narrow(model)
    return model


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Computes in the dtypes that are stored; int8 scales ask the policy for one."""
    fp32 = MixedPrecisionPolicy(FP32, FP32)
    policy = MixedPrecisionPolicy.by_name(
        model, {"*norm*": fp32}, param_dtype=BF16, cast_forward_inputs=False
    )
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


class TestNarrowWeights(ClientTest):
    @parametrize("kind", [*NARROW])
    def test_gradients_are_those_of_one_process(self, kind: str) -> None:
        # Which the release does not have
        from torch.distributed.fsdp import layout_summary

        model = build(NARROW[kind])
        reference = OneProcess(build(NARROW[kind]), loss_of)
        shard(model, make_mesh("cpu"))
        size, generator = 2 * self.world_size, torch.Generator().manual_seed(0)
        batch = torch.randn(size, 4, DIM, generator=generator).to(BF16)
        chunks = batch.chunk(self.world_size)
        stored = "int8 + bfloat16" in str(layout_summary(model))
        self.assertEqual(stored, kind == "int8")
        with record_collectives() as recorder:
            loss = loss_of(model, chunks[self.rank])
            loss.backward()
        self.check_backward(reference, model, loss, chunks, self.rank)
        # One byte for each narrow weight, and int8 has a scale for each row
        nbytes = DIM * 4 + 2 * DIM * DIM * (1 + 2) + (2 * 2 * DIM) * (kind == "int8")
        self.assertEqual([each.nbytes for each in recorder.all_gathers], [nbytes] * 4)


class TestFrozenWeights(ClientTest):
    def test_nf4_is_sharded(self) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        weight = to_nf4(torch.randn(256, 256, dtype=BF16))
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.LayerNorm(256))
        model[0].weight = nn.Parameter(weight, requires_grad=False)
        expected = weight.get_original_weight()
        fully_shard(model, mesh=make_mesh("cpu")).unshard()
        self.assertEqual(model[0].weight.get_original_weight(), expected)


if __name__ == "__main__":
    run_tests()
