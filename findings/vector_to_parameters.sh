#!/usr/bin/env bash
# The vector of bf16 and fp32 parameters is fp32, and writing it back *replaces* the storages.
. "$(dirname "$0")/common.sh"
python - <<'END'
import io
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.RMSNorm(64))
vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
dtypes = {name: param.dtype for name, param in model.named_parameters()}
buffer = io.BytesIO()
torch.save(model[1].weight, buffer)
print(torch.__version__, dtypes, len(buffer.getvalue()), "bytes for 64 numbers")
assert set(dtypes.values()) == {torch.float32}
assert len(buffer.getvalue()) > 4 * 64 * 64
END
