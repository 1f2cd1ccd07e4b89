#!/usr/bin/env bash
# `to(torch.float32)`, which looks like no change for an fp32 model, does it too, to rotary
# `freqs_cis` for one. The one warning does not say where.
. "$(dirname "$0")/common.sh"
python - <<'END'
import warnings
import torch

warnings.simplefilter("ignore")
for dtype, method in ((torch.bfloat16, "bfloat16"), (torch.float32, "float")):
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for layer in (first, second):
        layer.register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.arange(3.0)))
    first.to(dtype)
    getattr(second, method)()
    print(f"to({dtype}): {first.freqs_cis}, {method}(): {second.freqs_cis}")
    assert first.freqs_cis.dtype == dtype and second.freqs_cis.dtype == torch.complex64
END
