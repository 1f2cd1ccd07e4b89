#!/usr/bin/env bash
# One expects mse_loss of sharded DTensors, such as a penalty that pulls parameters to their
# pretrained values, to act as on whole tensors; `.square().mean()` does. But its gradient
# is N times too large over N ranks, and where ranks hold different numbers of rows the
# loss is wrong too (8.5 for 6.0). No warning. huber_loss, smooth_l1_loss: the same.
# torch 2.13.0, 2.15.0. Do: write `(a - b).square().mean()`.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

def run(loss_fn, whole):
    param = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    loss = loss_fn(param, torch.zeros_like(param))
    loss.backward()
    grad = param.grad.full_tensor() / whole
    return loss.full_tensor().item(), [round(x, 3) for x in grad.flatten().tolist()]

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for rows, wrong in (([1.0, 4.0], (8.5, [2, 2])), ([1.0, 1.0, 4.0], (8.5, [1, 1, 2]))):
    whole = torch.tensor(rows)
    seen = run(F.mse_loss, whole)
    right = run(lambda a, b: (a - b).square().mean(), whole)
    print(f"{rows}: mse_loss, gradient / value: {seen}; by hand {right}")
    assert seen == wrong
    assert right == (whole.square().mean(), [round(2 / len(rows), 3)] * len(rows))
dist.destroy_process_group()
END
