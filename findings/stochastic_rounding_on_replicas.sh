#!/usr/bin/env bash
# Each rank rounds by its own random numbers.
. "$(dirname "$0")/common.sh" torchao==0.18.0
ranks 2 <<'END'
from torchao.optim import _AdamW

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
END
