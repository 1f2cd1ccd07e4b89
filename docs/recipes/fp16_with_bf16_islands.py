"""
fp16 with bf16 islands, and `GradScaler`

Modules that overflow in fp16 compute in bf16, which has the range of fp32. A
`GradScaler` keeps small fp16 gradients from becoming 0, and all ranks skip a step
together. Parameters are stored in fp32. If you store fp16 parameters instead, give Adam
an `eps` that fp16 can represent: its default, 1e-8, becomes 0.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy


class Islands(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.island = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        wide = self.island(self.up(x).to(self.island.weight.dtype)).square()
        return self.down(F.rms_norm(wide, wide.shape[-1:]).to(x.dtype))


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
bf16, fp16 = torch.bfloat16, torch.float16
torch.manual_seed(0)
model = Islands()
policy = MixedPrecisionPolicy.by_name(
    model,
    {"island.*": {"param_dtype": bf16, "reduce_dtype": bf16}},
    param_dtype=fp16,
    reduce_dtype=fp16,
)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024)


def step(factor):
    before = [param.to_local().clone() for param in model.parameters()]
    loss = model(torch.randn(4, 16)).float().square().mean() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return [
        torch.equal(param.to_local(), old)
        for param, old in zip(model.parameters(), before)
    ]


assert not any(step(1.0))
# Gradients of one rank overflow: every rank skips the step, and halves the scale
assert all(step(1e9 if rank == 0 else 1.0))
assert scaler.get_scale() == 512
dist.destroy_process_group()
