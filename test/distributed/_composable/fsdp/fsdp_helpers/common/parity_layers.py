"""
A small model for comparisons of the release and this branch, which both run. It
multiplies in fp32: half matrices are slow on some processors.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


# Divides by 2 ranks and not by 4
DIM = 6
# A power of two: `param - LR * grad` rounds once, however it is computed
LR = 0.125
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

Record = dict[str, Any]


class Layer(nn.Module):
    """A matrix, a vector and parameters of other sizes, all of one dtype."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM).mul(0.4).to(dtype))
        self.gain = nn.Parameter((1 + 0.1 * torch.randn(DIM)).to(dtype))
        self.shift = nn.Parameter(torch.randn(3, DIM).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.float() * self.gain.float(), self.weight.float())
        return x + torch.tanh(y + self.shift.float().mean(0)).to(x.dtype)


class Block(nn.Module):
    """Layers one after the other, of which a forward may skip some."""

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, skip: Collection[int] = ()) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                x = layer(x)
        return x


class Stack(nn.Module):
    """Blocks of layers, and one behind them, or one before as well, of the root's own."""

    def __init__(
        self,
        dtypes: Sequence[Sequence[torch.dtype]],
        head: torch.dtype,
        stem: torch.dtype | None = None,
        kind: Callable[[torch.dtype], nn.Module] = Layer,
    ):
        super().__init__()
        self.stem = nn.Identity() if stem is None else kind(stem)
        self.blocks = nn.ModuleList(Block(map(kind, each)) for each in dtypes)
        self.head = kind(head)

    def forward(
        self,
        x: torch.Tensor,
        skip: Collection[int] = (),
        blocks: Collection[int] | None = None,
    ) -> torch.Tensor:
        """Runs all blocks, or these, and of each all layers but those to skip."""
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if blocks is None or i in blocks:
                x = block(x, skip=skip)
        return self.head(x)


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Gives what is made inside the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def stack(dtypes: Sequence[torch.dtype] = (FP32, FP32), *, blocks: int = 2) -> Stack:
    with seeded():
        return Stack([dtypes] * blocks, dtypes[0])


def shard_stack(model: Stack, **kwargs: Any) -> Stack:
    """Makes each block a unit, and the root one."""
    for unit in (*model.blocks, model):
        fully_shard(unit, **kwargs)
    return model


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """Returns the parameter groups of all units, the root's first."""
    states = (unit._get_fsdp_state() for unit in units_of(model))
    return [group for state in states for group in state._fsdp_param_groups]


def batch_of(*key: int, dim: int = DIM) -> torch.Tensor:
    """Returns the input that belongs to ``key``, e.g. a step and a rank."""
    seed = sum(part * 1000**i for i, part in enumerate(key))
    return torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensor: torch.Tensor | None) -> str | None:
    """Returns the dtype, the size and a digest of the bits of a local tensor."""
    if tensor is None:
        return None
    # Cloned, as a storage that numpy has seen cannot be resized
    local = local_of(tensor.detach()).cpu()
    local = local.clone(memory_format=torch.contiguous_format)
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    bits = hashlib.sha256(data).hexdigest()[:16]
    return f"{local.dtype} {tuple(local.shape)} {bits}"


def train_steps(
    model: nn.Module, run: Callable[[int], torch.Tensor], steps: range
) -> Record:
    """Returns losses, sharded gradients and parameters of steps up to backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    record: Record = {}
    for step in steps:
        record[f"{step} loss"] = digest(run(step))
        record |= {f"{step} {name}": bits for name, bits in gradients(model)}
        optimizer.step()
        optimizer.zero_grad()
        record |= {f"{step} {name}": bits for name, bits in parameters(model)}
    return record


def gradients(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, param in model.named_parameters():
        yield f"gradient {name}", digest(param.grad)


def parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, param in model.named_parameters():
        yield f"parameter {name}", digest(param)
