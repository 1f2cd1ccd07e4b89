"""
Full state dicts over FSDP with tensor parallelism

Over a 2-D mesh of FSDP and tensor parallelism, load a full state dict with
`broadcast_from_rank0=True`; the other ranks pass `{}`. Without it, loading ends in an
`AssertionError` without text where a size does not divide by the ranks. A unit may mix
dtypes there as anywhere.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)


dist.init_process_group("gloo")
shape = (dist.get_world_size() // 2, 2)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(
    nn.RMSNorm(8),
    nn.Linear(8, 6, bias=False, dtype=torch.bfloat16),
    nn.Linear(6, 8, bias=False, dtype=torch.bfloat16),
)
model[0].register_forward_hook(lambda module, args, out: out.bfloat16())
full = {name: 2 * value for name, value in model.state_dict().items()}
plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
fully_shard(model, mesh=mesh["dp"])

set_model_state_dict(
    model,
    dict(full) if dist.get_rank() == 0 else {},
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
)
model(torch.randn(2, 8)).float().sum().backward()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
saved = get_model_state_dict(model, options=options)
for name, value in saved.items():  # on rank 0 alone
    assert value.dtype == full[name].dtype
    assert torch.equal(value, full[name]), name
dist.destroy_process_group()
