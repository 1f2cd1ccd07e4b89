#!/usr/bin/env bash
# One expects a scale of shape [] and one of shape [1] to act alike. fully_shard refuses
# the first and says to make it the second. But an fp32 number without dims leaves a bf16
# activation bf16, while one with a dim promotes it: all that follows is fp32, at twice
# the memory, until a bf16 weight refuses it. torch 2.13.0, 2.15.0.
# Do: cast where it is used, `x * self.scale.to(x.dtype)`, or `x * self.scale[0]`.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4, 8, dtype=torch.bfloat16)
dtypes = []
for shape in ([], [1]):
    scale = torch.nn.Parameter(torch.ones(shape))
    dtypes.append((x * scale).dtype)
print(torch.__version__, dtypes, (x * scale[0]).dtype)
assert dtypes == [torch.bfloat16, torch.float32] and (x * scale[0]).dtype == torch.bfloat16
module = torch.nn.Module()
module.scale = torch.nn.Parameter(torch.ones([]))
try:
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    raise SystemExit("fully_shard takes it")
except ValueError as error:
    print(error)
dist.destroy_process_group()
END
