"""
Save model and optimizer, and resume

A resumed run continues bit for bit. State dicts hold shards in their storage dtypes.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.RMSNorm(8))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)
first = build(seed=0)
step(*first)
dcp.save(states(*first), checkpoint_id=folders[0])

resumed = build(seed=1)
state = states(*resumed)
dcp.load(state, checkpoint_id=folders[0])
set_state_dict(
    *resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
for run in (first, resumed):
    step(*run)
for param, other in zip(first[0].parameters(), resumed[0].parameters()):
    assert param.dtype == other.dtype
    assert torch.equal(param.to_local(), other.to_local())
dist.destroy_process_group()
