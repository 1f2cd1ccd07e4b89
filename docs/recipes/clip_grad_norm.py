"""
Clip gradients of several dtypes, and over several meshes

`clip_grad_norm_` takes the norm of each gradient in that gradient's dtype, and the norm
of these norms in the widest of them: 8 significant bits where all gradients are bf16. It
also fails where gradients are on different meshes. This one accumulates in fp32, for
each mesh by itself and then over the meshes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def clip_grad_norm(params, max_norm):
    """Clips in place, and returns the norm before: an fp32 tensor, equal on all ranks."""
    by_mesh = {}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(param.grad.device_mesh, []).append(param)
    norms = []
    for of_mesh in by_mesh.values():
        each = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in of_mesh]
        norms.append(torch.linalg.vector_norm(torch.stack(each)).full_tensor())
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, norm)
    return norm


dist.init_process_group("gloo")
ranks = dist.get_world_size()
sharded = init_device_mesh("cpu", (ranks,))
hybrid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "shard"))

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16)
)
fully_shard(model[1], mesh=hybrid)
fully_shard(model, mesh=sharded)
model(torch.randn(4, 64, dtype=torch.bfloat16)).square().mean().backward()

params = [*model.parameters()]
grads = [param.grad.full_tensor().double() for param in params]
exact = torch.stack([grad.norm() for grad in grads]).norm()
norm = clip_grad_norm(params, max_norm=exact.item() / 2)
assert abs(norm / exact - 1) < 1e-6
for param, grad in zip(params, grads):
    assert torch.allclose(param.grad.full_tensor().double(), grad / 2, rtol=2**-7)

# What torch does by itself: bf16 on one mesh, an error on two
rounded = nn.utils.get_total_norm([param.grad for param in model[0].parameters()])
assert rounded.dtype == torch.bfloat16
try:
    nn.utils.clip_grad_norm_(params, 1.0)
except (RuntimeError, ValueError) as error:
    assert "mesh" in str(error), error
else:
    raise AssertionError("torch clips over two meshes now")
dist.destroy_process_group()
