#!/usr/bin/env bash
# One expects 8-bit optimizer states to be chosen by the parameter's size. torchao chooses by
# the size of the *shard* (4096 numbers or more, divisible by the block size): of an unevenly
# sharded parameter one rank has quantized moments and another plain ones, so a checkpoint
# depends on the mesh, and the step of bf16 parameters raises on the first rank only, while
# the others go on and wait. torch 2.13.0, torchao 0.18.0.
# Do: only shard evenly what AdamW8bit steps, or keep such parameters in plain AdamW.
. "$(dirname "$0")/common.sh" torchao==0.18.0
ranks 2 <<'END'
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit

os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{__file__}.{os.environ['RANK']}"
dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for dtype in (torch.float32, torch.bfloat16):
    layer = torch.nn.Linear(1536, 5, bias=False, dtype=dtype)  # 3 rows and 2 rows
    fully_shard(layer, mesh=mesh)
    optimizer = AdamW8bit(layer.parameters())
    layer(torch.ones(1, 1536, dtype=dtype)).float().sum().backward()
    try:
        optimizer.step()
        result = "stepped"
    except Exception as error:
        result = type(error).__name__
    state = optimizer.state[layer.weight]["exp_avg"].to_local()
    seen = [None] * 2
    dist.all_gather_object(seen, (type(state).__name__, result))
    print(torch.__version__, dtype, seen)
    assert [each[0] for each in seen] == ["OptimState8bit", "Tensor"]
    assert [each[1] == "stepped" for each in seen] == [dtype == torch.float32, True]
dist.destroy_process_group()
END
