#!/usr/bin/env bash
# One expects HSDP replicas to stay equal, as they apply equal gradients. With stochastic
# rounding each rank rounds by its own random numbers: where ranks are seeded differently
# (dropout, data), replicas drift apart from the first step on, and nothing says so.
# torch 2.13.0, torchao 0.18.0.
# Do: the same seed on all replicas of a shard before each step.
. "$(dirname "$0")/common.sh" torchao==0.18.0
ranks 2 <<'END'
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchao.optim import _AdamW

dist.init_process_group("gloo")
# Two replicas of one shard
mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
for per_rank in (False, True):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    fully_shard(layer, mesh=mesh)
    optimizer = _AdamW(layer.parameters(), lr=1e-3, bf16_stochastic_round=True)
    torch.manual_seed(dist.get_rank() if per_rank else 0)
    for _ in range(10):
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard = layer.weight.to_local().float()
    other = shard.clone()
    dist.broadcast(other, 1)
    differ = (shard != other).float().mean().item()
    print(f"{torch.__version__}, {per_rank=}: {differ:.0%} of replica 0 differ from replica 1")
    assert (differ > 0.1) == (per_rank and dist.get_rank() == 0)
dist.destroy_process_group()
END
