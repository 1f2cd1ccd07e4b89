"""Trains a small language model whose layers mix bf16 and fp32: copy it, and go on.

    torchrun --nproc-per-node 4 examples/train.py STEPS FOLDER

Sharded over pairs of ranks and replicated over the pairs (HSDP), with accumulated
microbatches, clipped gradients, and checkpoints in FOLDER, from which it goes on.
"""

import os
import pydoc_data.topics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


DIM, LENGTH, BATCH, MICROBATCHES, SAVE_EVERY = 64, 32, 4, 2, 30


class Layer(nn.Module):
    """Matrices in bf16, and what is small but sensitive, the norm and a decay, in fp32."""

    def __init__(self):
        super().__init__()
        self.norm, self.decay = nn.RMSNorm(DIM), nn.Parameter(torch.zeros(DIM))
        self.up = nn.Linear(DIM, 2 * DIM, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        value, gate = self.up(self.norm(x).bfloat16()).float().chunk(2, dim=-1)
        before = F.pad(value, (0, 0, 1, 0))[:, :-1]
        value = value + torch.sigmoid(self.decay) * before
        return x + self.down((value * F.silu(gate)).bfloat16()).float()


steps, folder = int(sys.argv[1]), Path(sys.argv[2])
device = torch.device("cpu")
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
embedding, head = nn.Embedding(256, DIM), nn.Linear(DIM, 256)
model = nn.Sequential(embedding, *(Layer() for _ in range(3)), nn.Flatten(0, 1), head)
model.to(device)
for layer in model[1:4]:
    fully_shard(layer, mesh=mesh)  # one unit, of both dtypes
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)  # after fully_shard


def states():
    names = "model_state_dict", "optim_state_dict"
    return dict(zip(names, get_state_dict(model, optimizer)))


saved = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
if saved:
    dcp.load(loaded := states(), checkpoint_id=folder / str(saved))
    set_state_dict(model, optimizer, **loaded)

text = "".join(pydoc_data.topics.topics.values()).encode()
windows = torch.tensor([*text]).unfold(0, LENGTH + 1, LENGTH)
for step in range(saved, steps):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    for microbatch in range(MICROBATCHES):
        drawn = torch.randint(len(windows), (BATCH,), generator=generator)
        tokens = windows[drawn].to(device)
        model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        (loss / MICROBATCHES).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    norm = norm.full_tensor()  # of a DTensor: every rank has to call it
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.3f}", flush=True)
    if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
        dcp.save(states(), checkpoint_id=folder / str(step + 1))
dist.destroy_process_group()
# Threads of gloo may abort a process whose interpreter finalizes
if device.type == "cpu":
    os._exit(0)
