#!/usr/bin/env bash
# What each find begins with: a temporary environment of torch and the named packages. What
# it shows, and what to do, stands in docs/surprises.md.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
export PATH=$dir/bin:$PATH OMP_NUM_THREADS=1
pip install -q --no-compile torch==2.13.0 numpy "$@"
pip freeze | grep "^torch"

given='
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))'

# Runs what is given and the program on standard input: ranks HOW_MANY [ARGUMENT...]
ranks() {
    { echo "$given" && cat; } >"$dir/find.py"
    torchrun --standalone --local-ranks-filter 0 --nproc-per-node "$1" "$dir/find.py" "${@:2}"
}
