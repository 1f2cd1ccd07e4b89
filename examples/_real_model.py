"""What the examples of real models share: dtypes, batches, the command line."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from _compare import difference_table
from _half_products import widen_half_products
from _launch import as_rank, is_worker, launch, make_parser, parse_args, positive, TOLD
from _one_process import LossFunction, Step, train_side_by_side
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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


def make_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """All ranks to shard over, or groups of them that each have the whole model."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,))
    shape, names = (replicas, ranks // replicas), ("replicate", "shard")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


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


def main(
    script: str,
    description: str | None,
    build_model: BuildFunction,
    shard: ShardFunction,
    argv: Sequence[str],
) -> int:
    """Starts processes, or is one of them; returns the exit status."""
    parser = make_parser(description)
    parser.set_defaults(steps=5, batch_size=8)
    groups = "groups that each have the whole model, sharded inside (default: 1)"
    parser.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help=groups
    )
    args = parse_args(parser, argv)
    if args.nproc % args.replicas:
        parser.error(
            f"--replicas {args.replicas}: {args.nproc} processes do not divide"
        )
    if not is_worker():
        return launch(script, args.nproc, argv)
    return as_rank(lambda: _train_rank(args, build_model, shard))


def _train_rank(
    args: argparse.Namespace, build_model: BuildFunction, shard: ShardFunction
) -> int:
    """Trains and reports; returns the exit status."""
    widen_half_products()
    device = join(args.device)
    mesh = make_mesh(args.device, args.replicas)
    batches = token_batches(args.steps, args.batch_size, device)
    ok = _report(train(build_model, shard, mesh, batches, device))
    dist.destroy_process_group()
    return 0 if ok else TOLD


def join(device_type: str) -> torch.device:
    """Makes this process one of the group, and returns its device."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _report(steps: Iterator[Step]) -> bool:
    """Prints what comes of the steps; returns whether all are right on this rank."""
    ok, step = True, None
    for i, step in enumerate(steps, start=1):
        ok &= step.ok
        if dist.get_rank() == 0:
            losses = f"{step.loss:.6f}, in one process {step.expected_loss:.6f}"
            print(f"step {i}: loss {losses}", flush=True)
        for difference in step.differences:
            if not difference.ok:
                what = f"{difference.what}, {difference.where}"
                error = f"error: step {i}, rank {dist.get_rank()}: {what} differ"
                print(error, file=sys.stderr)
    if dist.get_rank() == 0 and step is not None:
        print("\nAt the last step, rank 0 and one process differ at most by:\n")
        print(difference_table(step.differences), flush=True)
    return ok
