"""
From the meta device to a loaded model with tied weights

The order is: make the model on the meta device, select parameters by name, shard, let
each rank allocate its shards (`to_empty`), load, and make the optimizer last. Tied modules
must be in one unit, and stay tied in `to_empty`; before `fully_shard`, `to_empty` would
give each a tensor of its own. Buffers that no checkpoint holds get memory, but no values. A
parameter that the checkpoint lacks would keep whatever its memory held, without an
error: compare the keys, or load with `broadcast_from_rank0=True`, which does.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy


class Model(nn.Module):
    def __init__(self, words=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.block = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, words, bias=False)
        self.register_buffer("scale", torch.empty(words), persistent=False)
        self.init_buffers()
        self.head.weight = self.embed.weight

    def init_buffers(self):
        self.scale.fill_(0.125)

    def forward(self, tokens):
        x = self.block(self.embed(tokens).to(self.block.weight.dtype))
        return self.head(x.to(self.head.weight.dtype)) * self.scale


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
full = Model().state_dict()  # stands for a checkpoint
with torch.device("meta"):
    model = Model()
policy = MixedPrecisionPolicy.by_name(
    model,
    {"embed.weight": {"param_dtype": torch.float32, "reduce_dtype": torch.float32}},
    param_dtype=torch.bfloat16,
)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cpu")
assert model.head.weight is model.embed.weight
model.init_buffers()
assert model.state_dict().keys() == full.keys()
options = StateDictOptions(full_state_dict=True)
set_model_state_dict(model, dict(full), options=options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for name, param in model.named_parameters():
    assert torch.equal(param.full_tensor(), full[name])
model(torch.randint(32, (2, 4))).float().square().mean().backward()
optimizer.step()
assert model.head.weight is model.embed.weight
assert not torch.equal(model.embed.weight.full_tensor(), full["embed.weight"])
dist.destroy_process_group()
