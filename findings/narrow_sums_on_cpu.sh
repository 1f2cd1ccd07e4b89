#!/usr/bin/env bash
# Each thread adds up bf16 numbers in bf16: also the gradient of index_add, and LayerNorm's where
# its weight is fp32 and only x is bf16. RMSNorm, GroupNorm and scatter_add are right.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
N, BF16 = 4096, torch.bfloat16
zeros = torch.zeros(N, dtype=torch.long)

def grad(function, weight_dtype):
    weight = torch.ones(4, dtype=weight_dtype, requires_grad=True)
    out = function(weight)
    out.backward(torch.ones_like(out))
    return weight.grad[0].item()

x = torch.ones(N, 4, dtype=BF16)
print(torch.__version__, "of", N, "ones")
for name, function, dtype, expected in (
    ("embedding", lambda w: F.embedding(zeros, w[None]), BF16, 256),
    ("x[index]", lambda w: w[None][zeros], BF16, 256),
    ("LayerNorm, all bf16", lambda w: F.layer_norm(x, (4,), None, w), BF16, 256),
    ("LayerNorm, fp32 bias", lambda w: F.layer_norm(x, (4,), x[0].float(), w), torch.float32, 256),
    ("RMSNorm", lambda w: F.rms_norm(x, (4,), w), BF16, N),
    ("linear", lambda w: F.linear(x, w[None]), BF16, N),
):
    print(name, grad(function, dtype))
    assert grad(function, dtype) == expected
END
