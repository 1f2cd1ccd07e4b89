#!/usr/bin/env bash
# One expects set_model_state_dict to load into the model that there is. It casts to the
# model's dtypes, but where the model is on the meta device it takes the checkpoint's: a
# bf16 model with an fp32 file trains in fp32 at twice the memory, and a model of fp32 and
# bf16 parameters becomes what the file is. Same file, same model, two results.
# torch 2.13.0, 2.15.0. Do: to_empty() before loading, or assert dtypes after it.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
for device, expected in (("cpu", torch.bfloat16), ("meta", torch.float32)):
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16, device=device)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, {"weight": torch.ones(4, 4)}, options=options)
    print(f"bf16 model on {device}, fp32 file: {model.weight.dtype}")
    assert model.weight.dtype == expected
dist.destroy_process_group()
END
