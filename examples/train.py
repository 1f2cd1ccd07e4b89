"""Trains a small language model whose layers mix bf16 and fp32: copy it, and go on.

    torchrun --nproc-per-node 4 examples/train.py STEPS FOLDER

Sharded over pairs of ranks, replicated over the pairs; resumes from FOLDER.
"""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)  # fp32, beside matrices in bf16
        self.up = nn.Linear(dim, 2 * dim, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        value, gate = self.up(self.norm(x).bfloat16()).chunk(2, dim=-1)
        return x + self.down(value * F.silu(gate)).float()


steps, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = "cuda" if has_gpus else "cpu"
shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
layers = [Layer(64) for _ in range(3)]
model = nn.Sequential(
    nn.Embedding(256, 64), *layers, nn.Flatten(0, 1), nn.Linear(64, 256)
)
for unit in (*layers, model):
    fully_shard(unit, mesh=mesh)  # a layer is one unit, of both dtypes
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)  # after fully_shard


def states():
    names = "model_state_dict", "optim_state_dict"
    return dict(zip(names, get_state_dict(model, optimizer)))


saved = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
if saved:
    dcp.load(loaded := states(), checkpoint_id=folder / str(saved))
    set_state_dict(model, optimizer, **loaded)

windows = torch.tensor([*"".join(topics.values()).encode()]).unfold(0, 33, 32)
for step in range(saved + 1, steps + 1):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    for is_last in (False, True):  # two microbatches, reduced together
        drawn = torch.randint(len(windows), (4,), generator=generator)
        tokens = windows[drawn].to(device)
        model.set_requires_gradient_sync(is_last)
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        (loss / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    norm = norm.full_tensor()  # of a DTensor: every rank has to call it
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}, norm {norm:.3f}", flush=True)
    if step % 30 == 0 or step == steps:
        dcp.save(states(), checkpoint_id=folder / str(step))
dist.destroy_process_group()
if device == "cpu":  # gloo's threads may abort a process whose interpreter finalizes
    os._exit(0)
