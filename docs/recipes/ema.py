"""
An fp32 average (EMA) of sharded bf16 parameters

Each rank averages its own shards, also where they are uneven or empty, without
communication. A sharded model cannot be deep-copied, so `AveragedModel` cannot be built
of it, and the average is a dict of DTensors; they have `full_tensor()` and can be saved
like the model's. It is kept in fp32: in bf16 it would never move, as at a decay of 0.999
an update is less than half of the distance to the next bf16 number. To evaluate with
the average, copy it in and back. Call `reshard()` first: a unit that a forward without
gradients left unsharded would keep its old values.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 5, dtype=torch.bfloat16), nn.Linear(5, 1, dtype=torch.bfloat16)
)
model.scale = nn.Parameter(torch.ones(3))  # fp32: float() alone would not copy it


def averages() -> dict[str, torch.Tensor]:
    params = model.named_parameters()
    return {name: p.detach().to(torch.float32, copy=True) for name, p in params}


expected = averages()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ema = averages()

for _ in range(3):
    out = model(torch.randn(2, 8, dtype=torch.bfloat16)).float() * model.scale.sum()
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, param in model.named_parameters():
            ema[name].to_local().lerp_(param.to_local().float(), 0.1)
            expected[name].lerp_(param.full_tensor().float(), 0.1)
for name, average in ema.items():
    assert average.dtype == torch.float32
    assert torch.equal(average.full_tensor(), expected[name])

# Why not otherwise
try:
    AveragedModel(model)
except AssertionError as error:
    assert "deepcopy" in str(error), error
else:
    raise AssertionError("torch averages sharded models now")
narrow = torch.ones(1, dtype=torch.bfloat16)
for _ in range(200):
    narrow.lerp_(torch.full_like(narrow, 2), 0.001)
assert narrow == 1

# Evaluate with the average, and go on training
model.reshard()
params = dict(model.named_parameters())
saved = {name: param.detach().clone() for name, param in params.items()}
with torch.no_grad():
    for name, param in params.items():
        param.copy_(ema[name])
    model(torch.randn(2, 8, dtype=torch.bfloat16))
    model.reshard()
    for name, param in params.items():
        param.copy_(saved[name])
dist.destroy_process_group()
