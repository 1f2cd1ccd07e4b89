#!/usr/bin/env bash
# One expects CommDebugMode to count what a program communicates. It counts no send, recv,
# isend, batch_isend_irecv (all of a pipeline's traffic) and no barrier: a total of 0. Any
# number of collectives in a coalescing manager counts 1, one all_gather_object counts 2.
# torch 2.13.0, 2.15.0. Do: compare counts of FSDP's collectives only, and take the
# profiler's c10d ranges for the rest.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

def count(function):
    with CommDebugMode() as mode:
        function()
    return mode.get_total_counts()

def send_and_receive():
    send = dist.P2POp(dist.isend, torch.ones(4), 1 - dist.get_rank())
    receive = dist.P2POp(dist.irecv, torch.ones(4), 1 - dist.get_rank())
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()

def coalesced():
    with dist.distributed_c10d._coalescing_manager():
        for _ in range(5):
            dist.all_reduce(torch.ones(4))

dist.init_process_group("gloo")
seen = [count(function) for function in (send_and_receive, dist.barrier, coalesced)]
seen.append(count(lambda: dist.all_gather_object([None] * 2, 1)))
print(torch.__version__, "p2p, barrier, five all-reduces, all_gather_object:", seen)
assert seen == [0, 0, 1, 2]
dist.destroy_process_group()
END
