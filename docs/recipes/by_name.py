"""
Dtypes by parameter name

Everything is stored in fp32, computes in bf16 and is reduced in fp32, except what the
patterns name: state-space parameters, router, norm and head compute in fp32, and the
embedding, often the largest parameter, is reduced in bf16. It is still one all-gather,
and one reduce-scatter for each reduce dtype. A pattern matches whole names: `norm.*` is
the last norm alone, `*norm*` those of the layers, too. A module whose parameter is wider
than its input casts the input itself. No policy is needed where the parameters are
*stored* in these dtypes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy


class Block(nn.Module):
    def __init__(self, dim=64, experts=8):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.A_log = nn.Parameter(torch.zeros(dim))
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.Parameter(0.1 * torch.randn(experts, dim, dim))

    def forward(self, x):
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        y = (y * torch.exp(-self.A_log.exp())).to(x.dtype)
        gates = self.router(y.to(self.router.weight.dtype)).softmax(-1).to(y.dtype)
        return x + torch.einsum("bte,edf,btd->btf", gates, self.experts, y)


class Model(nn.Module):
    def __init__(self, words=128, dim=64):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.layers = nn.Sequential(Block(), Block())
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens):
        x = self.layers(self.embed(tokens))
        return self.lm_head(F.silu(self.norm(x.to(self.norm.weight.dtype))))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
bf16, fp32 = torch.bfloat16, torch.float32


def shard(patterns):
    model = Model()
    policy = MixedPrecisionPolicy.by_name(
        model, patterns, param_dtype=bf16, reduce_dtype=fp32
    )
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def dtypes_of(model):
    rows = layout_summary(model).rows
    return {name: (r.compute_dtype, r.reduce_dtype) for r in rows for name in r.names}


patterns = {
    "*.A_log": {"param_dtype": fp32},
    "*.router.*": {"param_dtype": fp32},
    "*norm*": {"param_dtype": fp32},
    "lm_head.*": {"param_dtype": fp32},
    "embed.*": {"reduce_dtype": bf16},
}
model = shard(patterns)
model(torch.randint(128, (2, 5))).log_softmax(-1).amax(-1).sum().backward()
dtypes = dtypes_of(model)
assert dtypes["layers.0.A_log"] == dtypes["layers.1.router.weight"] == (fp32, fp32)
assert dtypes["norm.weight"] == dtypes["lm_head.weight"] == (fp32, fp32)
assert dtypes["layers.0.norm.weight"] == (fp32, fp32)
assert dtypes["layers.1.experts"] == (bf16, fp32)
assert dtypes["embed.weight"] == (bf16, bf16)
if dist.get_rank() == 0:
    print(layout_summary(model))

patterns["norm.*"] = patterns.pop("*norm*")
dtypes = dtypes_of(shard(patterns))
assert dtypes["norm.weight"] == (fp32, fp32)
assert dtypes["layers.0.norm.weight"] == (bf16, fp32)
dist.destroy_process_group()
