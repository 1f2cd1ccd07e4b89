"""
An fp32 checkpoint into mixed storage, and back

Loading copies into the parameters, so values are cast to the dtypes of the model: from a
full state dict and from a distributed checkpoint alike. What is saved has the dtypes of
the model; cast a full state dict to fp32 to write an fp32 checkpoint again. Call
`model.reshard()` before `set_model_state_dict` if the last forward ran without
gradients.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
bf16, fp32 = torch.bfloat16, torch.float32


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.RMSNorm(8))


# A full fp32 state dict, of which only rank 0 has a copy
model = fully_shard(make_model(bf16), mesh=mesh)
with torch.no_grad():
    model(torch.randn(2, 8, dtype=bf16))
model.reshard()
checkpoint = {name: 3 * value for name, value in make_model(fp32).state_dict().items()}
set_model_state_dict(
    model,
    dict(checkpoint) if dist.get_rank() == 0 else {},
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
)
assert [param.dtype for param in model.parameters()] == [bf16, bf16, fp32]
for name, param in model.named_parameters():
    assert torch.equal(param.full_tensor(), checkpoint[name].to(param.dtype))

# And back: rank 0 gets all of it
full = StateDictOptions(full_state_dict=True, cpu_offload=True)
saved = {
    name: value.float()
    for name, value in get_model_state_dict(model, options=full).items()
}
assert bool(saved) == (dist.get_rank() == 0)
assert {value.dtype for value in saved.values()} <= {fp32}

# A distributed checkpoint of an fp32 model
folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)
other = fully_shard(make_model(fp32), mesh=mesh)
dcp.save({"model": other.state_dict()}, checkpoint_id=folders[0])
state = {"model": get_model_state_dict(model)}
dcp.load(state, checkpoint_id=folders[0])
for param, wide in zip(model.parameters(), other.parameters()):
    assert torch.equal(param.to_local(), wide.to_local().to(param.dtype))
dist.destroy_process_group()
