"""
`ignored_params` beside sharded ones

An ignored parameter stays a plain tensor, whole on every rank. FSDP does not reduce its
gradient: average it by hand. `clip_grad_norm_` does not take plain tensors and DTensors
in one list: combine the norm of each, and clip both by it. One optimizer takes both.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
whole = [model[1].weight]
fully_shard(model, mesh=mesh, ignored_params={*whole})
sharded = [param for param in model.parameters() if param is not whole[0]]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())
model(torch.randn(2, 8)).square().sin().mean().backward()
for param in whole:
    dist.all_reduce(param.grad)
    param.grad /= ranks
norms = torch.stack(
    (
        nn.utils.get_total_norm([param.grad for param in sharded]).full_tensor(),
        nn.utils.get_total_norm([param.grad for param in whole]),
    )
)
for params in (sharded, whole):
    nn.utils.clip_grads_with_norm_(params, max_norm=1.0, total_norm=norms.norm())
optimizer.step()

first = whole[0].detach().clone()
dist.broadcast(first, src=0)
assert torch.equal(first, whole[0])
dist.destroy_process_group()
