#!/usr/bin/env bash
# What was lost by rounding, `x - x.bfloat16().float()`, is exactly 0. Needs a C++ compiler.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch
from torch._inductor import config

def low(x):
    return x - x.bfloat16().float()

def kahan(param, lost, update):
    update = update + lost
    new = param + update
    return new, update - (new - param)

def train(step):
    param, lost = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    for _ in range(200):
        param, lost = step(param, lost, torch.full_like(param, 1e-4))
    return param[0].item()

x = torch.linspace(1, 2, 1000)
for emulate in (False, True):
    torch._dynamo.reset()
    with config.patch(emulate_precision_casts=emulate):
        seen = torch.compile(low)(x).abs().max().item(), train(torch.compile(kahan))
    eager = low(x).abs().max().item(), train(kahan)
    print(f"{emulate=}: low part and Kahan sum {seen}, eager {eager}")
    assert seen == (eager if emulate else (0, 1))
END
