"""
Stream full weights to an inference engine

One parameter at a time is gathered, so a rank holds one full parameter beside its
shards. All ranks call `full_tensor()`, in the same order. `reshard()` every unit first:
a root stays unsharded after a forward without gradients, and its parameters would be
plain tensors in the dtypes they compute in, with the values of that forward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy


def full_weights(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, param in model.named_parameters():
        yield name, param.detach().full_tensor()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(model, mesh=mesh, mp_policy=policy)
with torch.no_grad():
    model(torch.randn(2, 8))
assert {param.dtype for param in model.parameters()} == {torch.bfloat16}

engine = {}  # stands for what receives the weights, on one rank
for name, weight in full_weights(model):
    if dist.get_rank() == 0:
        engine[name] = weight.to("cpu")
for name, weight in engine.items():
    assert weight.dtype == expected[name].dtype
    assert torch.equal(weight, expected[name])
dist.destroy_process_group()
