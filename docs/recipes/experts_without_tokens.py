"""
Experts without tokens on some ranks

A parameter that gets a gradient on some ranks only would make ranks reduce buffers of
different sizes. `set_reduce_scatter_unused_params(True)` reduces zeros for it, in its
gradient's dtype. It covers units whose forward ran: call the module on every rank, with
no tokens if need be.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Experts(nn.Module):
    def __init__(self, dim=8, experts=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))  # fp32 beside bf16
        self.experts = nn.ModuleList(
            nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)
            for _ in range(experts)
        )

    def forward(self, x, chosen):
        out = (x * self.scale).bfloat16()
        return self.experts[chosen](out)


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
model = fully_shard(Experts(), mesh=mesh)
model.set_reduce_scatter_unused_params(True)
model(torch.ones(2, 8), chosen=rank % 2).float().sum().backward()

for number, expert in enumerate(model.experts):
    users = sum(each % 2 == number for each in range(ranks))
    grad = expert.weight.grad.full_tensor()
    assert torch.equal(grad, torch.full_like(grad, 2 * users / ranks))
assert model.scale.grad.full_tensor().dtype == torch.float32
dist.destroy_process_group()
