#!/usr/bin/env bash
# With consolidation. CheckpointException is a BaseException: `except Exception` misses it.
. "$(dirname "$0")/common.sh" safetensors==0.8.0
python - <<'END'
import os
import tempfile
import warnings
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

warnings.simplefilter("ignore")

def write_and_read(entry):
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.HuggingFaceStorageWriter(
            folder, {"x": 1}, save_distributed=True, enable_consolidation=True
        )
        try:
            dcp.save({"x": entry}, storage_writer=writer, no_dist=True)
        except Exception as error:
            return f"Exception {type(error).__name__}"
        except BaseException as error:
            return f"BaseException {type(error).__name__}"
        (name,) = (each for each in os.listdir(folder) if each.endswith("safetensors"))
        try:
            return load_file(os.path.join(folder, name))["x"].tolist()
        except Exception as error:
            return f"read: {error}"

for entry, expected in (
    (torch.tensor([2.5]), "[2.5]"),
    (torch.tensor(2.5), "0.0"),
    (torch.tensor([1]), "BaseException CheckpointException"),
    (torch.tensor([True]), "BaseException CheckpointException"),
    (torch.tensor([1 + 2j]), "read: Error while deserializing header: invalid shape"),
):
    seen = str(write_and_read(entry))
    print(f"{entry}: {seen}")
    assert seen.startswith(expected)
END
