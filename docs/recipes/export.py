"""
Export to safetensors

Rank 0 writes full tensors, each in the dtype that it is stored in, whatever it computes
in. A parameter without dims, such as a `logit_scale`, is ignored by FSDP, and in the
state dict as it is. `HuggingFaceStorageWriter` with consolidation would write it as 0.0,
and stop at integer or bool buffers. The format is what `transformers` asks for.
"""

import os
import tempfile

from safetensors.torch import load_file, save_file

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy


class Model(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.proj = nn.Linear(dim, 5, bias=False, dtype=torch.bfloat16)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.proj(self.norm(x)) * self.logit_scale.exp()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Model()
nn.init.normal_(model.norm.weight)
expected = {name: value.clone() for name, value in model.state_dict().items()}
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params={model.logit_scale})
with torch.no_grad():
    model(torch.randn(2, 8))

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=options)  # on rank 0; elsewhere it is empty
if dist.get_rank() == 0:
    path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    save_file(full, path, metadata={"format": "pt"})
    loaded = load_file(path)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert torch.equal(loaded[name], value), name
dist.destroy_process_group()
