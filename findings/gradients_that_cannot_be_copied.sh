#!/usr/bin/env bash
# All gradients of a unit are views of one buffer, and torch takes a DTensor whose offset in it
# is not 0 for one with data of its own.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import copy
import io

def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)

model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
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
END
