#!/usr/bin/env bash
# One expects `x.bfloat16().float()` to round, compiled or not. But inductor removes such
# pairs of casts: what was lost by rounding, `x - x.bfloat16().float()`, is exactly 0, so a
# bf16 pair (high and low part), Kahan sums of bf16 parameters, error feedback and fake
# quantization silently do nothing. Needs a C++ compiler. torch 2.13.0, 2.15.0.
# Do: torch._inductor.config.emulate_precision_casts = True, or leave that code eager.
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
