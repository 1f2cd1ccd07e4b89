"""
Dtypes by parameter name

Everything is stored in fp32, computes in bf16 and is reduced in fp32, except what the
patterns name: state-space parameters, router, norm and head compute in fp32, and the
embedding, often the largest parameter, is reduced in bf16. It is still one all-gather,
and one reduce-scatter for each reduce dtype. A module whose parameter is wider than its
input casts the input itself. No policy is needed where the parameters are *stored* in
these dtypes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy


class Model(nn.Module):
    def __init__(self, words=128, dim=64, experts=8):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.norm = nn.RMSNorm(dim)
        self.A_log = nn.Parameter(torch.zeros(dim))
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.Parameter(0.1 * torch.randn(experts, dim, dim))
        self.lm_head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x.float()).to(x.dtype)
        x = (x * torch.exp(-self.A_log.exp())).to(x.dtype)
        gates = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        x = x + torch.einsum("bte,edf,btd->btf", gates, self.experts, x)
        return self.lm_head(F.silu(x).to(self.lm_head.weight.dtype))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
bf16, fp32 = torch.bfloat16, torch.float32

model = Model()
policy = MixedPrecisionPolicy.by_name(
    model,
    {
        "A_log": {"param_dtype": fp32},
        "router.*": {"param_dtype": fp32},
        "norm.*": {"param_dtype": fp32},
        "lm_head.*": {"param_dtype": fp32},
        "embed.*": {"reduce_dtype": bf16},
    },
    param_dtype=bf16,
    reduce_dtype=fp32,
)
fully_shard(model, mesh=mesh, mp_policy=policy)
model(torch.randint(128, (2, 5))).log_softmax(-1).amax(-1).sum().backward()

rows = layout_summary(model).rows
dtypes = {
    name: (row.compute_dtype, row.reduce_dtype) for row in rows for name in row.names
}
assert dtypes["A_log"] == dtypes["router.weight"] == (fp32, fp32)
assert dtypes["norm.weight"] == dtypes["lm_head.weight"] == (fp32, fp32)
assert dtypes["experts"] == (bf16, fp32)
assert dtypes["embed.weight"] == (bf16, bf16)
assert {row.reduce_dtype for row in rows if row.names} == {fp32, bf16}
if dist.get_rank() == 0:
    print(layout_summary(model))
dist.destroy_process_group()
