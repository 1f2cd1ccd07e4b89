#!/usr/bin/env bash
# One expects `x.sum().half()` of a sharded x to be the whole sum, cast. But the sum is
# still partial then, and a cast keeps it so: each rank casts its own part and the
# reduction runs in the narrow dtype. 70000 and -70000 on two ranks sum to nan instead of
# 0, and 256 + 1 + 1 + 1 in bf16 to 258 instead of 260. torch 2.13.0, 2.15.0.
# Do: `x.sum().full_tensor()` first, then cast.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for values, dtype, expected in (
    ([70000.0, -70000.0], torch.float16, (torch.nan, 0.0)),
    ([256.0, 1.0, 1.0, 1.0], torch.bfloat16, (258.0, 260.0)),
):
    total = distribute_tensor(torch.tensor(values), mesh, [Shard(0)]).sum()
    seen = torch.stack([total.to(dtype).full_tensor(), total.full_tensor().to(dtype)])
    print(f"{values} in {dtype}: cast, then whole {seen[0]}; whole, then cast {seen[1]}")
    assert torch.equal(seen.nan_to_num(-1), torch.tensor(expected, dtype=dtype).nan_to_num(-1))
dist.destroy_process_group()
END
