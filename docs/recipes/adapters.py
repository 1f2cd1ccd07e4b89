"""
fp32 adapters beside a trainable bf16 head

One unit holds these and frozen bf16 weights. Each parameter computes in its stored
dtype; frozen weights are gathered and not reduced. The adapter's module casts its input
and its result. Saved is what is trained alone (`ignore_frozen_params`), which loads
with `strict=False`.
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
from torch.distributed.fsdp import fully_shard, layout_summary


class Adapted(nn.Module):
    def __init__(self, dim=64, rank=8):
        super().__init__()
        self.base = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(0.02 * torch.randn(rank, dim))
        self.lora_B = nn.Parameter(torch.zeros(dim, rank))
        self.head = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        added = x.to(self.lora_A.dtype) @ self.lora_A.T @ self.lora_B.T
        return self.head(self.base(x) + added.to(x.dtype))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(Adapted(), mesh=mesh)
model(torch.randn(10, 64, dtype=torch.bfloat16)).float().sum().backward()
assert model.base.weight.grad is None
assert model.lora_B.grad.dtype == torch.float32
assert model.head.weight.grad.dtype == torch.bfloat16

reduced = {r.reduce_dtype: r.reduced_nbytes for r in layout_summary(model).rows[:-1]}
frozen, adapter, head = 0, 2 * 8 * 64 * 4, 64 * 64 * 2
assert reduced == {None: frozen, torch.float32: adapter, torch.bfloat16: head}

trained = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
saved = get_model_state_dict(model, options=trained)  # on rank 0; elsewhere it is empty
if dist.get_rank() == 0:
    assert {*saved} == {"lora_A", "lora_B", "head.weight"}
before = model.lora_A.full_tensor()
torch.nn.init.zeros_(model.lora_A)
loading = StateDictOptions(
    strict=False, full_state_dict=True, broadcast_from_rank0=True
)
set_model_state_dict(model, saved, options=loading)
assert torch.equal(model.lora_A.full_tensor(), before)
dist.destroy_process_group()
