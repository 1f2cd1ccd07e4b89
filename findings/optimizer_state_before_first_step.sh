#!/usr/bin/env bash
# get_optimizer_state_dict makes the state by a real step with lr=0 that stays counted; ASGD
# keeps that lr in its state.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

def first_update(cls, save):
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = cls(layer.parameters(), lr=0.1, weight_decay=0)
    if save:
        get_optimizer_state_dict(layer, optimizer)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return round(layer.weight.item(), 4)

for name, expected in (("AdamW", (-0.1, -0.0744)), ("ASGD", (-0.1, 0.0))):
    seen = tuple(first_update(getattr(torch.optim, name), save) for save in (False, True))
    print(f"{name}: first update {seen[0]}, after a save {seen[1]}")
    assert seen == expected
END
