"""
Save while training goes on

`async_save` communicates from a thread. On a process group that training uses, its
collectives would mix with FSDP's: give it a gloo group of its own.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
saving = dist.new_group(backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.RMSNorm(8))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)
step()
expected = [param.to_local().clone() for param in model.parameters()]
state = {"model": model.state_dict()}
future = dcp.async_save(state, checkpoint_id=folders[0], process_group=saving)
step()  # what is saved was copied before async_save returned
future.result()

dcp.load(state, checkpoint_id=folders[0])
for param, shard in zip(model.parameters(), expected):
    assert torch.equal(param.to_local(), shard)
dist.destroy_process_group()
