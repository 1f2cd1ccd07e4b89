#!/usr/bin/env bash
# Also what earlier calls left there. GPipe, 1F1B, interleaved 1F1B.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
from torch.distributed import pipelining

for name in ("ScheduleGPipe", "Schedule1F1B"):
    for scale, expected in ((True, [1, 1.25, 1.3125]), (False, [4, 8, 12])):
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(layer.weight)
        rank = dist.get_rank()
        stage = pipelining.PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, name)(
            stage, 4, loss_fn=lambda out, _: out.mean(), scale_grads=scale
        )
        seen = []
        for _ in range(3):
            schedule.step(*([torch.ones(4, 1)] if rank == 0 else []), target=torch.ones(4, 1))
            seen.append(layer.weight.grad.item())
        print(f"{name}, {scale=}, rank {rank}: {seen}")
        assert seen == expected
END
