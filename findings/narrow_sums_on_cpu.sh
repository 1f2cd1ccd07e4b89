#!/usr/bin/env bash
# One expects sums over tokens to run in fp32 and to be rounded once, as those of linear
# layers are, above all where the gradient is fp32. On CPUs the gradient of an embedding, of
# x[index], index_add and of LayerNorm is added up in bf16 and stops at 256 (for each
# thread): LayerNorm's also where its weight and gradient are fp32 and only x is bf16.
# RMSNorm, GroupNorm, scatter_add are right. torch 2.13.0, 2.15.0, CPU only.
# Do: embed and normalize in fp32 on CPUs (x.float()); do not judge bf16 runs by a CPU.
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
