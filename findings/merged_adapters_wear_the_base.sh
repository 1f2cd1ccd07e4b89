#!/usr/bin/env bash
# Each merge and unmerge rounds a bf16 base, and while the adapter trains the errors add up.
. "$(dirname "$0")/common.sh" peft==0.21.2
python - <<'END'
import torch
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
model = get_peft_model(model, LoraConfig(target_modules=["0"]))
layer = model.base_model.model[0]
base, up = layer.base_layer.weight, layer.lora_B["default"].weight
torch.nn.init.normal_(up, std=0.02)
before = base.detach().float()
seen = {}
for step in range(1, 1001):
    model.merge_adapter()
    model.unmerge_adapter()
    up.data.add_(torch.randn_like(up), alpha=1e-4)  # a step of the optimizer
    error = (base.float() - before).norm() / before.norm()
    seen[step] = (base != before).float().mean().item(), error.item()
for step in (1, 10, 100, 1000):
    print(f"{torch.__version__}, {step} rounds: {seen[step][0]:.0%} changed, by {seen[step][1]:.2%}")
assert seen[1000][0] > 0.4 and seen[1000][1] > 3 * seen[1][1]
END
