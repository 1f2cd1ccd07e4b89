#!/usr/bin/env bash
# `x * self.scale[0]` leaves x as it is as well.
. "$(dirname "$0")/common.sh"
ranks 1 <<'END'
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
    fully_shard(module, mesh=mesh)
    raise SystemExit("fully_shard takes it")
except ValueError as error:
    print(error)
END
