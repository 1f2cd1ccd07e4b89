#!/usr/bin/env bash
# With a decay of 0.999 each update is below half of the spacing of bf16 numbers, and so is
# the plain mean's after some hundred models. lerp takes one dtype, unless avg_fn casts.
. "$(dirname "$0")/common.sh"
python - <<'END'
import copy
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

def average(wide, **options):
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    start = copy.deepcopy(model).float() if wide else model
    averaged = AveragedModel(start, **options)
    for step in range(1000):
        torch.nn.init.constant_(model.weight, 1 if step < 500 else 2)
        averaged.update_parameters(model)
    return averaged.module.weight.item()

ema = {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}
fp32_ema = {"avg_fn": lambda mean, new, count: mean.lerp(new.float(), 0.001)}
seen = average(False, **ema), average(False), average(True, **fp32_ema)
print(torch.__version__, "500 times 1, then 2: bf16 EMA, bf16 mean, fp32 EMA", seen)
assert seen[:2] == (1, 1) and 1.3 < seen[2] < 1.6
try:
    average(True, **ema)
    raise SystemExit("lerp takes two dtypes")
except RuntimeError as error:
    print(error)
END
