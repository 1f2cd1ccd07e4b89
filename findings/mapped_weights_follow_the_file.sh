#!/usr/bin/env bash
# torch.save writes over a file in place. safetensors writes a new one, so its mappings stay.
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
