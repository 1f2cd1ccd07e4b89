#!/usr/bin/env bash
# AdamW raises only after it has decayed the weight and counted the step; others of the first
# list only count. Those of the second take such gradients; fused SGD and Adagrad raise.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch

expected = dict.fromkeys(("Adam", "NAdam", "RAdam", "Adamax"), (1.0, 3, 3))
expected |= {"AdamW": (0.85546875, 3, 3), "AdamW fused": (1.0, 3, 3)}
runs = ("SGD", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop", "Adafactor", "Muon")
print(torch.__version__, "parameter, counted steps, errors")
for name in (*expected, *runs):
    param = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    param.grad_dtype, param.grad = torch.float32, torch.zeros(2, 2)
    options = {"weight_decay": 0.5, "fused": "fused" in name} if "AdamW" in name else {}
    optimizer = getattr(torch.optim, name.split()[0])([param], lr=0.1, **options)
    errors = 0
    for _ in range(3):
        try:
            optimizer.step()
        except RuntimeError:
            errors += 1
    seen = param[0, 0].item(), int(optimizer.state[param].get("step", 0)), errors
    print(f"{name}: {seen}")
    assert seen == expected[name] if name in expected else errors == 0
END
