#!/usr/bin/env bash
# The key of the cache on disk, which the ranks of a node share, holds a DTensor's whole shape.
# Do: no cache, or a TORCHINDUCTOR_CACHE_DIR for each rank, where DTensors are compiled.
. "$(dirname "$0")/common.sh"
for cache in 0 1; do
    ranks 2 $cache <<'END'
import os
import sys
import tempfile

folder = [tempfile.mkdtemp(dir=os.path.dirname(__file__))]
dist.broadcast_object_list(folder)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder[0]
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = sys.argv[1]
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
END
done
