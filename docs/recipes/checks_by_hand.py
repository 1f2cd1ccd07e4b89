"""
Checks by hand, alike on all ranks

`.item()` and `bool()` of a reduced DTensor read the rank's own part: of `norm`, `sum`
or `max`, and before 2.15 also of `isfinite().all()`. Ranks that skip a step by such a
number drift apart, or hang. `full_tensor()` first, on all ranks, gives the whole one.
To decide over all gradients, one all-reduce of a count is enough, on any meshes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def count_not_finite(params):
    """Returns how many numbers of all gradients are inf or nan, alike on all ranks."""
    count = torch.zeros((), dtype=torch.int64)  # on GPUs: on the rank's
    for param in params:
        if param.grad is not None:  # may differ between ranks: no collective here
            count += (~param.grad.to_local().isfinite()).sum()
    dist.all_reduce(count)
    return count.item()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
model.scale = nn.Parameter(torch.ones(8))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

counts = []
for step in range(3):
    factors = torch.ones(8)
    factors[0] = torch.inf if step == 1 else 1  # rank 0 has this row
    out = model(torch.ones(2, 8, dtype=torch.bfloat16)).float() * model.scale
    (out * factors).sum().backward()
    counts.append(count_not_finite(model.parameters()))
    grad = model[0].weight.grad
    if counts[-1]:
        assert grad.to_local().isfinite().all() == (dist.get_rank() > 0)
    else:
        norm = torch.linalg.vector_norm(grad)
        whole = norm.full_tensor().item()  # to log, or to decide by
        assert norm.item() < whole  # the rank's own part
        exact = grad.full_tensor().double().norm().item()
        assert abs(whole / exact - 1) < 2**-7
        optimizer.step()
    optimizer.zero_grad()
assert counts == [0, 8 + 1, 0]
dist.destroy_process_group()
