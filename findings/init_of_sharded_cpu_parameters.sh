#!/usr/bin/env bash
# With gloo, or CPU offload. A warning says only that support on CPUs "may" be incomplete.
. "$(dirname "$0")/common.sh"
ranks 4 <<'END'
from torch import nn

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
END
