#!/usr/bin/env bash
# The default floor under Adafactor's second moment is the square of the *parameter dtype's*
# eps: bf16 gradients below 0.0078 are not normalized. Or store such parameters in fp32.
. "$(dirname "$0")/common.sh"
python - <<'END'
import torch

def update(dtype, grad, **options):
    param = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    param.grad = torch.full_like(param, grad)
    torch.optim.Adafactor([param], lr=1e-2, **options).step()
    return -param[0, 0].item()

for grad, low, high in ((1e-1, 0.9, 1.1), (1e-3, 7, 9), (1e-4, 70, 90)):
    ratio = update(torch.float32, grad) / update(torch.bfloat16, grad)
    fixed = update(torch.float32, grad) / update(torch.bfloat16, grad, eps=(1e-30, 1e-3))
    print(f"gradient {grad}: fp32's update / bf16's {ratio:.2f}, with eps=1e-30 {fixed:.2f}")
    assert low < ratio < high and 0.9 < fixed < 1.1
END
