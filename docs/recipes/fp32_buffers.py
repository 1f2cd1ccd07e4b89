"""
fp32 buffers under bf16 compute and checkpointing

FSDP casts parameters and the inputs of a unit, never buffers. `model.bfloat16()` does
cast them: give dtypes to parameters instead, as `from_pretrained` does. And what is
computed outside of a unit in fp32, such as cosines and sines, is cast to `param_dtype`
when it is passed in: compute it inside from integer positions, or set
`cast_forward_inputs=False`. Recomputation sees the same dtypes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.proj = nn.Linear(dim, dim, bias=False)
        frequencies = 10000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.seen = []

    def rotated(self, x, positions):
        angles = positions[:, None] * self.frequencies  # fp32
        self.seen.append((angles.dtype, self.proj.weight.dtype))
        a, b = self.proj(x).float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def forward(self, x, positions):
        return checkpoint(self.rotated, x, positions, use_reentrant=False)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
block = Block()
exact = block.frequencies.clone()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(block, mesh=mesh, mp_policy=policy)
block(torch.randn(4, 16), torch.arange(1000, 1004)).float().sum().backward()
assert torch.equal(block.frequencies, exact)
# Forward, and recomputed in backward
assert block.seen == [(torch.float32, torch.bfloat16)] * 2
dist.destroy_process_group()
