"""The models that are measured, and how each side makes units of them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, fully_shard, MixedPrecisionPolicy


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


# Many small parameters, for host time #


class Scales(nn.Module):
    """Parameters of one dtype, each used by one multiplication."""

    def __init__(self, count: int, shape: Sequence[int], dtype: torch.dtype):
        super().__init__()
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


SHAPE = (16, 8)  # of every parameter: two rows for each of eight ranks

# Dtypes of a unit's parameters, MixedPrecisionPolicy's arguments
PRECISIONS: dict[str, tuple[tuple[torch.dtype, ...], dict[str, torch.dtype]]] = {
    "fp32": ((FP32,), {}),
    "fp32, bf16 compute": ((FP32,), {"param_dtype": BF16, "reduce_dtype": FP32}),
    "mixed": ((FP32, BF16, FP16), {}),
}


def scales_block(params: int, dtypes: Sequence[torch.dtype]) -> nn.Sequential:
    """Returns ``params`` parameters, as evenly over the dtypes as they divide."""
    counts = [len(range(i, params, len(dtypes))) for i in range(len(dtypes))]
    scales = [Scales(n, SHAPE, dtype) for n, dtype in zip(counts, dtypes) if n]
    return nn.Sequential(*scales)


def shard_scales(
    model: nn.Sequential, *, per_dtype: bool, policy: dict[str, Any], device: str
) -> None:
    """Makes each block one unit, or one for each of its dtypes."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    mp_policy = MixedPrecisionPolicy(**policy)
    for block in model:
        for unit in block.children() if per_dtype else (block,):
            fully_shard(unit, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)


# Blocks of language models #


class Linear(nn.Linear):
    """Computes in its weight's dtype and answers in its input's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Block(nn.Module):
    """A residual block. Its parameters are of one dtype, or of two."""

    def second_unit(self) -> list[nn.Module]:
        """Modules to make a unit of if the rest shall be of one dtype; else none."""
        return []


class LlamaBlock(Block):
    """Attention and a gated feed-forward network, all bf16."""

    def __init__(self, dim: int = 512, heads: int = 8, hidden: int = 1408):
        super().__init__()
        self.heads = heads
        self.attention_norm = RMSNorm(dim, dtype=BF16)
        square = (self._projection(dim, dim) for _ in range(4))
        self.wq, self.wk, self.wv, self.wo = square
        self.ffn_norm = RMSNorm(dim, dtype=BF16)
        self.w1 = self._projection(dim, hidden)
        self.w2 = self._projection(hidden, dim)
        self.w3 = self._projection(dim, hidden)

    def _projection(self, inputs: int, outputs: int) -> nn.Module:
        return Linear(inputs, outputs, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            w(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class AdaptedLinear(nn.Module):
    """A bf16 matrix with a trainable fp32 correction of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8):
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False, dtype=BF16)
        self.down = Linear(inputs, rank, bias=False, dtype=FP32)
        self.up = Linear(rank, outputs, bias=False, dtype=FP32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class AdapterBlock(LlamaBlock):
    """A Llama-like block with an fp32 adapter at each matrix, all of it trained."""

    def _projection(self, inputs: int, outputs: int) -> nn.Module:
        return AdaptedLinear(inputs, outputs)

    def second_unit(self) -> list[nn.Module]:
        adapted = [m for m in self.modules() if isinstance(m, AdaptedLinear)]
        return [part for m in adapted for part in (m.down, m.up)]


class NemotronHBlock(Block):
    """A Mamba-2 mixer as in Nemotron-H: what decays and the norms are fp32."""

    def __init__(self, dim: int = 512, heads: int = 16, state: int = 64):
        super().__init__()
        self.heads, self.state, self.inner = heads, state, 2 * dim
        mixed = self.inner + 2 * state
        self.norm = RMSNorm(dim)
        self.in_proj = Linear(dim, self.inner + mixed + heads, bias=False, dtype=BF16)
        self.conv = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed, dtype=BF16)
        self.A_log = nn.Parameter(torch.linspace(0, 2, heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.full((heads,), -2.0))
        self.gated_norm = RMSNorm(self.inner)
        self.out_proj = Linear(self.inner, dim, bias=False, dtype=BF16)

    def second_unit(self) -> list[nn.Module]:
        return [self.in_proj, self.conv, self.out_proj]

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.inner, self.inner + 2 * self.state, self.heads]
        gate, mixed, dt = self.in_proj(self.norm(x)).split(sizes, dim=-1)
        channels = mixed.transpose(1, 2).to(self.conv.weight.dtype)
        mixed = F.silu(self.conv(channels)[..., : x.size(1)].transpose(1, 2)).float()
        values, b, c = mixed.split([self.inner, self.state, self.state], dim=-1)
        values = values.unflatten(-1, (self.heads, -1))
        y = self._scan(values, b, c, F.softplus(dt.float() + self.dt_bias))
        y = (y + values * self.D[:, None]).flatten(2).to(x.dtype)
        return x + self.out_proj(self.gated_norm(y * F.silu(gate)))

    def _scan(self, values: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """The state-space recurrence as one masked product over all positions."""
        log_decay = (dt * -self.A_log.exp()).cumsum(1)  # position 1, head 2
        between = log_decay[:, :, None] - log_decay[:, None]
        future = torch.ones(between.shape[1:3]).triu(1).bool().to(between.device)
        decay = between.masked_fill(future[..., None], float("-inf")).exp()
        weights = (c @ b.transpose(1, 2))[..., None] * decay * dt[:, None]
        return torch.einsum("btsh,bshp->bthp", weights, values)


class RouterBlock(Block):
    """Experts in bf16, weighed by a router in fp32, and a norm in fp32."""

    def __init__(self, dim: int = 512, experts: int = 4, hidden: int = 512):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.router = Linear(dim, experts, bias=False, dtype=FP32)
        shapes = (experts * dim, hidden), (experts * hidden, dim)
        self.experts = nn.ParameterList(torch.zeros(s, dtype=BF16) for s in shapes)

    def second_unit(self) -> list[nn.Module]:
        return [self.norm, self.router]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1).movedim(-1, 0)[..., None]
        up, down = (p.unflatten(0, (len(weights), 1, -1)) for p in self.experts)
        return x + (weights * (normed @ up @ down)).sum(0)


BLOCKS: dict[str, type[Block]] = {
    "Llama-like": LlamaBlock,
    "Nemotron-H-like": NemotronHBlock,
    "fp32 adapters": AdapterBlock,
}
UNIFORM_BLOCK = "Llama-like"
MIXED = {n: b for n, b in BLOCKS.items() if n != UNIFORM_BLOCK}
MIXED |= {"fp32 router": RouterBlock}
NUM_BLOCKS = 3
# Arguments of a block, as in models of 8 billion parameters: for devices
LARGE = {
    UNIFORM_BLOCK: {"dim": 4096, "heads": 32, "hidden": 12288},
    "Nemotron-H-like": {"dim": 4096, "heads": 128, "state": 128},
    "fp32 adapters": {"dim": 4096, "heads": 32, "hidden": 12288},
    "fp32 router": {"dim": 2048, "experts": 32, "hidden": 1536},
}

# Ways to train a model of several dtypes
AS_IT_IS = "as it is"  # one unit a block, whatever its dtypes
PER_DTYPE = "one unit per dtype"
ALL_FP32 = "all fp32"  # upcast before it is sharded
LATE = "BACKWARD_POST"
# All in bf16, and gradients added in fp32: sent in fp32 too, or in bf16
WIDE, NARROW = "sent in fp32", "sent in bf16"
# Sent in one all-to-all, as wide as they are; small reductions joined
EXCHANGED, JOINED = "grad_comm_dtype", "set_reduce_bucket_cap"
COALESCED = "set_coalesced_collectives"
POLICIES: dict[str, dict[str, Any]] = {
    WIDE: {"param_dtype": BF16, "reduce_dtype": FP32},
    NARROW: {"param_dtype": BF16, "reduce_dtype": FP32, "grad_comm_dtype": BF16},
    EXCHANGED: {"grad_comm_dtype_override_fn": lambda param: param.dtype},
}


def shard(model: nn.Sequential, way: str, mesh: DeviceMesh) -> None:
    """Makes each block a unit, or one for each of its dtypes."""
    policy = MixedPrecisionPolicy(**POLICIES.get(way, {}))
    for block in model:
        assert isinstance(block, Block)
        if way == PER_DTYPE and (second := block.second_unit()):
            fully_shard(second, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    # The release has none of these setters
    if way == LATE:
        fsdp.set_backward_prefetch(model, BackwardPrefetch.BACKWARD_POST)
    if way == COALESCED:  # of small models, all parameters
        is_small = all(param.nbytes < 2**24 for param in model.parameters())
        fsdp.set_coalesced_collectives(model, 0 if is_small else 2**20)
    if way == JOINED:
        fsdp.set_reduce_bucket_cap(model)


def language_model(
    block: str, way: str, device: str, size: str = ""
) -> tuple[nn.Sequential, Tensor]:
    """Returns a sharded stack of blocks, the same on every rank and side, and an input."""
    # Studies, which make models of their own, do not find the tests' packages
    from fsdp_helpers.clients.half_products import widen_half_products

    widen_half_products()
    torch.manual_seed(0)
    is_large = device == "cuda" and size != "small"
    sizes = LARGE[block] if is_large else {}
    with torch.device(device):
        model = nn.Sequential(*(BLOCKS[block](**sizes) for _ in range(NUM_BLOCKS)))
    if way == ALL_FP32:
        model.float()
    shard(model, way, init_device_mesh(device, (dist.get_world_size(),)))
    sequences, positions = (1, 512) if is_large else (2, 32)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(sequences, positions, sizes.get("dim", 512), generator=generator)
    return model, x.to(device, FP32 if way == ALL_FP32 else BF16)


def ask_both(
    sides: dict[str, Any], module: str, ours: str, theirs: str, **request: Any
) -> dict[str, dict[str, Any]]:
    """Returns what a module measures of the branch in one way, of the release in another."""
    found = {}
    for name, way in (("branch", ours), ("release", theirs)):
        sides[name].start()
        found[name] = sides[name].ask(module, {"way": way, **request})
    return found


def digest_of(tensor: Tensor) -> str:
    as_bytes = tensor.detach().cpu().reshape(-1).clone().view(torch.uint8)
    return hashlib.sha256(as_bytes.numpy().tobytes()).hexdigest()


def training_step(model: nn.Module, x: Tensor) -> None:
    """Forward, backward, and the gradients are gone, as after an optimizer's step."""
    model(x).float().square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
