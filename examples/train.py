"""torchrun --nproc-per-node 4 examples/train.py STEPS FOLDER: trains, and resumes."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)  # fp32, beside a matrix in bf16
        self.linear = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.linear(self.norm(x).bfloat16()).relu().float()


steps, folder, names = int(sys.argv[1]), Path(sys.argv[2]), ("replicate", "shard")
has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = "cuda" if has_gpus else "cpu"
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
mesh = dist.init_device_mesh(device, shape, mesh_dim_names=names)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), Layer(64), Layer(64), nn.Linear(64, 256))
for unit in (*model[1:-1], model):
    fully_shard(unit, mesh=mesh)  # a layer is one unit, of both dtypes
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)  # after fully_shard
parts = "model_state_dict", "optim_state_dict"
if saved := max((int(p.parent.name) for p in folder.glob("*/.metadata")), default=0):
    states = dict(zip(parts, get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=folder / str(saved))
    set_state_dict(model, optimizer, **states)
windows = torch.tensor([*Path(torch.__file__).read_bytes()]).unfold(0, 33, 32)
for step in range(saved + 1, steps + 1):
    torch.manual_seed(step * ranks + rank)
    for is_last in (False, True):  # two microbatches, reduced together
        model.set_requires_gradient_sync(is_last)
        tokens = windows[torch.randint(len(windows), (4,))].to(device)
        inputs, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # all ranks
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}, norm {norm:.3f}", flush=True)
    if step % 30 == 0 or step == steps:
        states = dict(zip(parts, get_state_dict(model, optimizer)))
        dcp.save(states, checkpoint_id=folder / str(step))
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort a process whose interpreter finalizes
