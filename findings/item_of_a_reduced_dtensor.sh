#!/usr/bin/env bash
# One expects `grad.isnan().any()` or `grad.norm().item()` of a sharded gradient to be the
# same on all ranks. bool(), float() and item() read the rank's own part of what is not yet
# reduced: one rank sees the NaN and skips the step, the other goes on, and they drift
# apart or hang. torch 2.13.0: all, any, sum, mean, max, norm, count_nonzero; 2.15.0
# reduces all() and any(), not the rest. Do: full_tensor() first, on all ranks.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
bad = distribute_tensor(torch.tensor([1.0, torch.nan]), mesh, [Shard(0)])
good = distribute_tensor(torch.tensor([1.0, 4.0]), mesh, [Shard(0)])
checks = {name: getattr(good, name)() for name in ("sum", "mean", "max", "norm")}
checks |= {"isnan().any": bad.isnan().any(), "isfinite().all": bad.isfinite().all()}
for name, value in checks.items():
    seen = [None] * 2
    dist.all_gather_object(seen, value.item())
    whole = value.full_tensor().item()
    print(f"{torch.__version__} {name}(): item() {seen}, full_tensor() {whole}")
    assert seen[0] != seen[1]
dist.destroy_process_group()
END
