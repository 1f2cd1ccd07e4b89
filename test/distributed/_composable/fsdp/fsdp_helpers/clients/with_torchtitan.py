# Owner(s): ["oncall: distributed"]
"""
torchtitan's models, sharded by its own ``apply_fsdp_to_decoder``, beside one process.
What of it needs a GPU, kernels of Triton and compiled attention, is stood in for.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fsdp_helpers.clients import real_models
from fsdp_helpers.clients.common import ClientTest
from fsdp_helpers.clients.real_models import make_mesh, train_side_by_side

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.testing._internal.common_utils import run_tests


BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = "torchtitan.distributed.minimal_async_ep"
VOCABULARY = 2048


def in_fp32(norm: nn.Module) -> None:
    """Has a norm compute in fp32 between modules that compute in bf16."""
    norm.float()
    norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    norm.register_forward_hook(lambda _, args, out: out.to(BF16))


def debug_config(kind: str) -> Any:
    """Returns the configuration of two layers, with two experts if it has any."""
    sys.modules.setdefault(KERNELS, mock.MagicMock())
    from torchtitan.models import llama3, qwen3

    if kind == "llama3":
        config = llama3._debugmodel("flex")
        config.layers = config.layers[:2]
        return config
    layers, fewer = qwen3._build_qwen3_moe_layers, {"n_layers": 2, "moe_hidden_dim": 32}
    fewer |= {"num_experts": 2, "top_k": 1}
    with mock.patch.object(
        qwen3, layers.__name__, lambda **kwargs: layers(**kwargs | fewer)
    ):
        return qwen3._debugmodel_moe("flex")


def build(kind: str = "llama3") -> nn.Module:
    """Returns a debug model in bf16, but for norms that compute in fp32."""
    config = debug_config(kind)
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    for name, param in model.named_parameters():
        if "norm" not in name:
            param.data = param.detach().to(BF16)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            in_fp32(module)
    return model


def shard(model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    """As ``parallelize_llama`` does it, with the dtypes that parameters have."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    apply_fsdp_to_decoder(model, mesh, None, None, pp_enabled=False, **kwargs)


def token_loss(ranks: int, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns a part for units, as torchtitan adds up their gradients undivided."""
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if isinstance(model, FSDPModule):
        loss.register_hook(lambda grad: grad / ranks)
    return loss


def batches(steps: int, size: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randint(VOCABULARY, (size, 17), generator=generator)


class TestLlama(ClientTest):
    def test_trains_as_one_process(self) -> None:
        loss_of = functools.partial(token_loss, self.world_size)
        mesh, data = make_mesh("cpu"), batches(3, 2 * self.world_size)
        self.check_steps(train_side_by_side(build(), shard, mesh, loss_of, data))


class TestExperts(ClientTest):
    world_size = 4

    def test_experts_sharded_on_dim_1(self) -> None:
        """Two experts cannot be shared out among four ranks."""
        model: Any = build("qwen3")
        loss_of = functools.partial(token_loss, self.world_size)
        mesh, data = make_mesh("cpu"), batches(2, 2 * self.world_size)
        self.check_steps(train_side_by_side(model, shard, mesh, loss_of, data))
        experts = model.layers["0"].moe.routed_experts.inner_experts
        placements = {param.placements for param in experts.parameters()}
        self.assertEqual(placements, {(Shard(1),)})

    def test_a_mesh_for_each_parameter(self) -> None:
        """Experts are sharded over two of the four ranks, all else over all."""
        names = ("ep", "efsdp")
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = build("qwen3")
        loss_of = functools.partial(token_loss, self.world_size)
        reference = real_models.OneProcess(build("qwen3"), loss_of)
        shard(model, make_mesh("cpu"), ep_degree=2, edp_mesh=meshes["efsdp"])
        for batch in batches(2, 4):
            # Ranks that share no experts get the same tokens
            chunks = batch.chunk(2)
            place = meshes.get_local_rank("efsdp")
            loss = loss_of(model, chunks[place])
            loss.backward()
            for name, param in model.named_parameters():
                self.assertIsNotNone(param.grad, name)
                if "inner_experts" in name:
                    self.assertEqual(param.device_mesh, meshes["efsdp"])
                    param.grad *= 2  # the sum of two, not of four
            self.check_backward(reference, model, loss, chunks, place)
            model.zero_grad()


if __name__ == "__main__":
    run_tests()
