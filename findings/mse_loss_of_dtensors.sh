#!/usr/bin/env bash
# Such as a penalty that pulls parameters to pretrained values. huber_loss, smooth_l1_loss too.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import torch.nn.functional as F

def run(loss_fn, whole):
    param = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    loss = loss_fn(param, torch.zeros_like(param))
    loss.backward()
    grad = param.grad.full_tensor() / whole
    return loss.full_tensor().item(), [round(x, 3) for x in grad.flatten().tolist()]

for rows, wrong in (([1.0, 4.0], (8.5, [2, 2])), ([1.0, 1.0, 4.0], (8.5, [1, 1, 2]))):
    whole = torch.tensor(rows)
    seen = run(F.mse_loss, whole)
    right = run(lambda a, b: (a - b).square().mean(), whole)
    print(f"{rows}: mse_loss, gradient / value: {seen}; by hand {right}")
    assert seen == wrong
    assert right == (whole.square().mean(), [round(2 / len(rows), 3)] * len(rows))
END
