"""What the examples of real models share: dtypes, losses and batches."""

from collections.abc import Callable, Collection, Iterator

import torch
from _launch import join, make_mesh  # noqa: F401  (also for tests)
from _one_process import LossFunction, Step, train_side_by_side
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh


VOCABULARY = 64
SEQUENCE_LENGTH = 16

BuildFunction = Callable[[], nn.Module]
ShardFunction = Callable[[nn.Module, DeviceMesh], object]


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, but_fp32: Collection[str]
) -> None:
    """Casts every parameter to ``dtype``, but those of the given names to fp32.

    A name fits where a parameter's ends with it: ``gate.weight`` is the weight of
    every module called ``gate``. Buffers stay as they are.
    """
    found = set()
    for name, parameter in model.named_parameters():
        fits = {end for end in but_fp32 if f".{name}".endswith(f".{end}")}
        parameter.data = parameter.detach().to(torch.float32 if fits else dtype)
        found |= fits
    if found != set(but_fp32):
        raise ValueError(f"no parameter is called {set(but_fp32) - found}")


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that transformers' models compute themselves."""
    return model(input_ids=tokens, labels=tokens).loss


def token_batches(
    steps: int, batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Yields sequences that count up from random tokens, alike in every process."""
    generator = torch.Generator().manual_seed(0)
    count = torch.arange(SEQUENCE_LENGTH)
    for _ in range(steps):
        first = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        yield ((first + count) % VOCABULARY).to(device)


def train(
    build_model: BuildFunction,
    shard: ShardFunction,
    mesh: DeviceMesh,
    batches: Iterator[Tensor],
    device: torch.device,
    loss_of: LossFunction = causal_loss,
) -> Iterator[Step]:
    """Trains the model sharded, and yields its steps, compared with one process."""
    torch.manual_seed(0)
    model = build_model().to(device)
    return train_side_by_side(model, shard, mesh, loss_of, batches)
