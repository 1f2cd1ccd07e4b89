#!/usr/bin/env bash
# One expects torch.compile to specialize on the tensors that it gets, on each rank. The key
# of its cache on disk, which the ranks of a node share, holds a DTensor's whole shape, not
# its shard's: of an unevenly sharded parameter, rank 1 gets rank 0's graph and raises
# `expected size 2==3`. It depends on who compiles first, and a second run is sure to fail.
# torch 2.13.0, 2.15.0. Do: TORCHINDUCTOR_AUTOGRAD_CACHE=0, or a TORCHINDUCTOR_CACHE_DIR
# for each rank, where DTensors are compiled (optimizers, clipping).
. "$(dirname "$0")/common.sh"
for cache in 0 1; do
    ranks 2 $cache <<'END'
import os
import sys
import tempfile
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp(dir=os.path.dirname(__file__))]
dist.broadcast_object_list(folder)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder[0]
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = sys.argv[1]
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
param = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])  # 3 rows and 2 rows
double = torch.compile(lambda x: (x * 2).exp())
for rank in range(2):
    if rank == dist.get_rank():
        try:
            seen = double(param).to_local().shape
        except AssertionError as error:
            seen = str(error).split(" at ")[0]
    dist.barrier()
expected = "expected size 2==3" if sys.argv[1] == "1" and dist.get_rank() == 1 else "torch.Size"
assert str(seen).startswith(expected)
each = [None] * 2
dist.all_gather_object(each, seen)
print(f"{torch.__version__}, cache {sys.argv[1]}: {each}")
dist.destroy_process_group()
END
done
