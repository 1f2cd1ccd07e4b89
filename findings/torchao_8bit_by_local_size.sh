#!/usr/bin/env bash
# A shard of 4096 numbers or more, divisible by the block size, has 8-bit states: a checkpoint
# depends on the mesh, and where one rank raises, the others wait.
. "$(dirname "$0")/common.sh" torchao==0.18.0
ranks 2 <<'END'
import os
from torchao.optim import AdamW8bit

os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{__file__}.{os.environ['RANK']}"
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
END
