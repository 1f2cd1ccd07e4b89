#!/usr/bin/env bash
# It casts to the model's dtypes, but not to those of a model on the meta device.
. "$(dirname "$0")/common.sh"
ranks 1 <<'END'
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
for device, expected in (("cpu", torch.bfloat16), ("meta", torch.float32)):
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16, device=device)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, {"weight": torch.ones(4, 4)}, options=options)
    print(f"bf16 model on {device}, fp32 file: {model.weight.dtype}")
    assert model.weight.dtype == expected
END
