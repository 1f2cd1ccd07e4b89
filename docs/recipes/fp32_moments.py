"""
fp32 moments without master weights, and stochastic rounding

Adam's moments have the dtype of the parameter, and a bf16 update below half of the
spacing of a parameter is lost. This step keeps the moments of bf16 shards in fp32,
computes the new value in fp32 and rounds it up or down at random, so that small updates
are kept on average. It works on local shards, needs no communication, and saves the
four bytes per parameter of a master. (torchao's `_AdamW(bf16_stochastic_round=True)`
rounds like this, with moments in bf16.) Replicas (HSDP) stay equal only while they draw
the same noise: seed them alike before each step, as this program is. Save these moments
by name: `load_state_dict` of an optimizer would cast them, and `NAdam`'s `mu_product`, to
the parameter's dtype.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def round_at_random(exact):
    """fp32 to bf16: adds a random number below the last bit that is kept, and cuts."""
    noise = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
    kept = (exact.view(torch.int32) + noise) & -(1 << 16)
    return kept.view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def adamw_step(params, state, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
    for param in params:
        shard, grad = param.to_local(), param.grad.to_local().float()
        if param not in state:
            state[param] = torch.zeros_like(grad), torch.zeros_like(grad)
        mean, square = state[param]
        mean.lerp_(grad, 1 - betas[0])
        square.lerp_(grad.square(), 1 - betas[1])
        denominator = (square / (1 - betas[1] ** step)).sqrt() + eps
        exact = shard.float() * (1 - lr * decay)
        exact -= lr * mean / (1 - betas[0] ** step) / denominator
        shard.copy_(round_at_random(exact) if shard.dtype == torch.bfloat16 else exact)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.RMSNorm(64))
model[0].register_forward_hook(lambda module, args, out: out.float())
reference = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64))
reference.load_state_dict(model.state_dict())
fully_shard(model, mesh=mesh)

before = reference[1].weight.detach().clone()
x = torch.randn(4, 64)
state = {}
optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
for step in range(1, 4):
    for each, value in ((model, x.bfloat16()), (reference, x)):
        each.zero_grad()
        each(value).square().sin().mean().backward()
    adamw_step(model.parameters(), state, step)
    optimizer.step()
# The fp32 norm follows torch's own AdamW; the bf16 matrix is a neighbor of it
norm, matrix = model[1].weight.full_tensor(), model[0].weight.full_tensor()
assert not torch.equal(norm, before)
assert torch.allclose(norm, reference[1].weight, atol=5e-4)
assert torch.allclose(matrix.float(), reference[0].weight, atol=1e-2)
halfway = torch.full((4096,), 1 + 2**-8)  # between two bf16 numbers
assert abs(round_at_random(halfway).double().mean() - (1 + 2**-8)) < 2**-10
dist.destroy_process_group()
