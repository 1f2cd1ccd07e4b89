#!/usr/bin/env bash
# One expects weights that torch.load(mmap=True) read, and training changed since, to be
# the process's own. But torch.save writes over a file in place: saving to the same path
# (another model, a rank, the next step) changes the weights that are mapped, those that
# were written to as well. safetensors writes a new file, and its mappings stay.
# torch 2.13.0, 2.15.0, Linux. Do: save to a new name and os.replace() it, or clone().
. "$(dirname "$0")/common.sh"
python - <<'END'
import os
import tempfile
import torch

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "weights.pt")
    torch.save({"weight": torch.ones(1 << 20)}, path)
    weight = torch.load(path, mmap=True)["weight"]
    weight.add_(5)  # a step
    torch.save({"weight": torch.full((1 << 20,), 3.0)}, path)
    print(torch.__version__, weight.unique())
    assert weight.unique().tolist() == [3]
END
