#!/usr/bin/env bash
# Nor does it count what pipelines send by batch_isend_irecv.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
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

seen = [count(function) for function in (send_and_receive, dist.barrier, coalesced)]
seen.append(count(lambda: dist.all_gather_object([None] * 2, 1)))
print(torch.__version__, "p2p, barrier, five all-reduces, all_gather_object:", seen)
assert seen == [0, 0, 1, 2]
END
