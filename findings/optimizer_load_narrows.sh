#!/usr/bin/env bash
# Also scalars such as NAdam's mu_product and ASGD's eta, which those optimizers keep in fp32
# themselves. set_optimizer_state_dict does the same.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch

for cls in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW):
    states = []
    for _ in range(2):
        param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = cls([param])
        if states:
            optimizer.load_state_dict(saved)
        else:
            for _ in range(3):
                param.grad = torch.ones_like(param)
                optimizer.step()
            if cls is torch.optim.AdamW:  # moments in fp32, as some training loops keep them
                optimizer.state[param]["exp_avg_sq"] = torch.full((4,), 1 + 2**-10)
            saved = optimizer.state_dict()
        states.append(optimizer.state[param])
    names = [name for name in states[0] if states[0][name].dtype != states[1][name].dtype]
    for name in names:
        print(cls.__name__, name, *(state[name].flatten()[0] for state in states))
    assert names == {"NAdam": ["mu_product"], "ASGD": ["eta", "mu"]}.get(cls.__name__, ["exp_avg_sq"])
END
