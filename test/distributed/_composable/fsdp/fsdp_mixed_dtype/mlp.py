"""
The script that pytorch issue 156784 is about: an MLP of two fp32 layers and a
bf16 one, sharded as one unit over two ranks. The tests run it on the release,
which refuses it, and on this branch, which trains it.

It prints the loss of every step as rank 0 has it, exactly.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


RANKS = 2
STEPS = 8
# A power of two: `param - LR * grad` rounds once, however it is computed
LR = 0.25


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return self.third(x.to(torch.bfloat16))


def seeded_mlp() -> MLP:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MLP()


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's inputs and targets, the same in every step."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.stack([x.sum(1), x[:, 0], -x[:, 1]], dim=1)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    x, target = batch_of(rank)
    return nn.functional.mse_loss(model(x).float(), target)


def train_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    model = fully_shard(seeded_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        loss = loss_of(model, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(loss.item().hex(), flush=True)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        # A fork need not import torch again
        mp.start_processes(train_rank, (store,), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
