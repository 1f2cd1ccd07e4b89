#!/usr/bin/env bash
# It copies whatever the dtypes are, without a warning, but refuses another shape.
. "$(dirname "$0")/common.sh"
python - <<'END'
import tempfile
import warnings
import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
for value, dtype, expected in (
    (1 + 2**-10, torch.bfloat16, 1),
    (1 + 2j, torch.float32, 1),
    (2.5, torch.int64, 2),
    (2.5, torch.bool, 1),
    (2**24 + 1, torch.float32, 2**24),
):
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"entry": torch.tensor([value])}, checkpoint_id=folder)
        target = {"entry": torch.zeros(1, dtype=dtype)}
        dcp.load(target, checkpoint_id=folder)
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["entry"]
    print(f"{value} in {saved.properties.dtype}, loaded: {target['entry']}")
    assert target["entry"].item() == expected and saved.properties.dtype != dtype
END
