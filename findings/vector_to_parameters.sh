#!/usr/bin/env bash
# One expects vector_to_parameters(parameters_to_vector(...)) to change nothing, or only
# values. Of bf16 and fp32 parameters the vector is fp32, and writing it back *replaces*
# the storages: every bf16 parameter is fp32 from then on, and all are views of one vector,
# so that saving one of them saves all. torch 2.13.0, 2.15.0.
# Do: copy_() into the parameters, slice by slice.
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
