"""
What modes and cases train. Parameters of each dtype are in a module of their own, which
the release can shard. Where gradients of several uses meet, there are two of them: a
sum of two does not depend on its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fsdp_helpers.common import parity_layers
from fsdp_helpers.common.parity_layers import BF16, FP16, FP32, seeded, Stack

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


# Divides by 4 ranks; the other sizes do not
DIM = 8
HIDDEN = 5
CODE = 3

MIXED = ((FP32, BF16, FP16), (FP16, FP32, BF16))


class Decoder(nn.Module):
    """Uses another module's parameter under a name of its own."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, code: torch.Tensor) -> torch.Tensor:
        return F.linear(code, self.weight.t())


class Part(nn.Module):
    """Parameters of one dtype, also a small, an uneven, a shared and a frozen one."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.gain = nn.Parameter(1 + torch.randn(DIM).mul(0.1).to(dtype))
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM).mul(0.4).to(dtype))
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN).mul(0.4).to(dtype))
        self.scale = nn.Parameter(torch.rand(1).add(0.5).to(dtype))
        self.code = nn.Parameter(torch.randn(CODE, DIM).mul(0.3).to(dtype))
        self.shift = nn.Parameter(torch.randn(DIM).to(dtype), requires_grad=False)
        self.decoder = Decoder(self.code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.up.dtype) * self.gain + self.shift
        y = F.linear(torch.tanh(F.linear(y, self.up)), self.down) * self.scale
        y = y + self.decoder(F.linear(y, self.code))
        return x + y.to(x.dtype)


def mixed_tower() -> Stack:
    with seeded():
        return Stack(MIXED, head=FP32, stem=BF16, kind=Part)


def uniform_tower(dtype: torch.dtype) -> Stack:
    with seeded():
        return Stack(((dtype, dtype),) * 2, head=dtype, stem=dtype, kind=Part)


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Returns all parts of a tower, by name."""
    return {n: part for n, part in model.named_modules() if isinstance(part, Part)}


batch_of = partial(parity_layers.batch_of, dim=DIM)


# Layers that see local tensors as their parameters #

SIZES = ((8, 3), (5,), (4, 2, 3))


class Waves(nn.Module):
    """Adds a wave of each parameter to its input, whatever the parameter's shape."""

    def __init__(self, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]] = SIZES):
        super().__init__()
        self.params = nn.ParameterList(torch.randn(s).to(dtype) for s in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.params:
            weight = param.to_local() if isinstance(param, DTensor) else param
            x = x + torch.sin(weight.float() * x.float().mean()).mean().to(x.dtype)
        return x


class Offsets(Waves):
    """Uses its parameters in a way that backward does not need them for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.params:
            x = x + param.float().mean().to(x.dtype)
        return x


def stack_of(kind: type[nn.Module], dtypes: Sequence[torch.dtype]) -> nn.Sequential:
    """Returns two blocks that hold a module of each dtype."""
    with seeded():
        blocks = [nn.Sequential(*(kind(dtype) for dtype in dtypes)) for _ in range(2)]
        return nn.Sequential(*blocks)


# Extensions #


class Extended(torch.Tensor):
    """Wraps fp32 values with an all-gather of their own, in the compute dtype."""

    _values: torch.Tensor
    gathers = 0  # of all extension tensors, in this process

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Extended:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor):
        self._values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(Extended, lambda t: t._values, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(torch.Tensor, cls, result)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values})"

    def numpy(self) -> Any:
        return self._values.numpy()

    def whole_shard(self) -> torch.Tensor:
        """Returns the local shard with its padding, behind it in its storage."""
        Extended.gathers += 1
        row, shard = self.shape[1:].numel(), self._values
        numel = shard.untyped_storage().nbytes() // shard.itemsize
        whole = torch.empty(0, dtype=shard.dtype, device=shard.device)
        size = (numel // row, *shard.shape[1:])
        return whole.set_(shard.untyped_storage(), 0, size)

    def unpack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the values of all ranks, padded, in fp32."""
        raise NotImplementedError

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if metadata != type(self).__name__:
            raise AssertionError(f"Got the metadata of another: {metadata}")
        values = self.unpack(outputs).to(param_dtype)
        if out is None:
            return values, (values,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values[: out.size(0)])
        return None


class Fp8(Extended):
    """Gathered as fp8 with one fp32 scale a rank, through the shorter signature."""

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        values = self.whole_shard()
        scale = values.abs().amax().clamp(min=1e-6).reshape(1) / 448
        payload = (values / scale).to(torch.float8_e4m3fn)
        return (payload, scale), type(self).__name__

    def unpack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        payload, scale = inputs
        by_rank = payload.float().view(scale.numel(), -1)
        return (by_rank * scale.unsqueeze(1)).view(payload.size())


class HighLow(Extended):
    """Gathered as a bf16 part and the fp16 rest, through the longer signature."""

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> Any:
        if not isinstance(module, nn.Module) or outer_size[1:] != self.shape[1:]:
            raise AssertionError("Got the arguments in another order")
        values = self.whole_shard()
        high = values.to(torch.bfloat16)
        return (high, (values - high).to(torch.float16)), type(self).__name__

    def unpack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        high, low = inputs
        return high.float() + low.float()


class ExtendedWaves(Waves):
    """Waves of fp32 parameters of which some have an all-gather of their own."""

    def __init__(self, kind: type[Extended], rows: int):
        super().__init__(torch.float32)
        for size in ((rows, 3), (rows + 4, 2)):
            self.params.append(nn.Parameter(kind(torch.randn(size))))


def extended_stack(
    kind: type[Extended], rows: int, others: Sequence[torch.dtype]
) -> nn.Sequential:
    """Returns two blocks of extension tensors beside plain ones of other dtypes."""
    with seeded():
        blocks = [[ExtendedWaves(kind, rows), *map(Waves, others)] for _ in range(2)]
        return nn.Sequential(*(nn.Sequential(*block) for block in blocks))
