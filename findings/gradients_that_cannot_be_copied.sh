#!/usr/bin/env bash
# One expects to be able to deep-copy or save a sharded gradient, as any tensor. All gradients
# of a unit are views of one buffer, and torch takes a DTensor whose offset in it is not 0
# for one with data of its own: copy.deepcopy and torch.save raise `invalid python storage`
# for all gradients but the first, and deepcopy also for parameters that have such a .grad.
# torch 2.13.0, 2.15.0. Do: param.grad.clone() first; detach() parameters.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import copy
import io
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
model(torch.ones(1, 4)).sum().backward()
for name, tensor, fails in (
    ("first gradient", model.weight.grad, False),
    ("second gradient", model.bias.grad, True),
    ("its parameter", model.bias, "deepcopy"),
    ("its clone", model.bias.grad.clone(), False),
    ("its parameter, detached", model.bias.detach(), False),
):
    saved = error_of(lambda: torch.save(tensor, io.BytesIO()))
    copied = error_of(lambda: copy.deepcopy(tensor))
    print(f"{name}: torch.save {saved}, deepcopy {copied}")
    assert bool(saved) == (fails is True) and bool(copied) == bool(fails)
dist.destroy_process_group()
END
