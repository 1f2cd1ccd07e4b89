"""
Evaluate between backward and the optimizer step

A unit that does not reshard after forward, by default the root, stays unsharded after a
forward without gradients, since no backward comes to reshard it. The next forward would
then compute with the values from before the step. Call `reshard()` right after
evaluation, before anything reads or writes parameters or gradients: `clip_grad_norm_`,
which would skip this unit's gradients without an error, an optimizer step,
`set_model_state_dict`, an optimizer that is made then.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = torch.ones(2, 8)

model(x).square().mean().backward()
with torch.no_grad():
    before = model(x)
assert not isinstance(model[0].weight, DTensor)  # still unsharded
model.reshard()
assert isinstance(model[0].weight, DTensor)
optimizer.step()
with torch.no_grad():
    after = model(x)
assert after.square().mean() < 0.9 * before.square().mean()
dist.destroy_process_group()
