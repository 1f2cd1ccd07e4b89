#!/usr/bin/env bash
# One expects nn.init on a sharded parameter to fill it with independent numbers. With
# parameters on CPUs (gloo, or CPU offload) and one seed on all ranks, each rank draws the
# same rows: an 8 x 8 matrix over 4 ranks has rank 2, and orthogonal_ is not orthogonal.
# A warning says only that support on CPUs "may" be incomplete. torch 2.13.0, 2.15.0.
# Do: initialize before sharding, or seed each rank (and replica group) differently.
. "$(dirname "$0")/common.sh"
ranks 4 <<'END'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
with torch.device("meta"):
    layer = nn.Linear(8, 8, bias=False)
fully_shard(layer, mesh=mesh)
layer.to_empty(device="cpu")
for seed, expected in ((0, 2), (dist.get_rank(), 8)):
    torch.manual_seed(seed)
    layer.reset_parameters()
    rank = torch.linalg.matrix_rank(layer.weight.full_tensor()).item()
    nn.init.orthogonal_(layer.weight)
    whole = layer.weight.full_tensor()
    error = (whole @ whole.T - torch.eye(8)).abs().max().item()
    print(f"{torch.__version__}, seed {seed}: matrix rank {rank}, orthogonal to {error:.1e}")
    assert rank == expected and (error > 0.1) == (expected == 2)
dist.destroy_process_group()
END
