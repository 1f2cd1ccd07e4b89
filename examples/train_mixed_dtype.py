"""Trains a language model whose FSDP2 units hold bf16, fp32 and fp16 parameters.

    python examples/train_mixed_dtype.py [--nproc N] [--steps N] [--policy NAME]

starts its own processes; so does

    torchrun --nproc-per-node N examples/train_mixed_dtype.py

Parameters compute and reduce in the dtypes that they are stored in, or as the policy
says. A table then tells what each kind of unit sent in one step. The same model is
trained once more in one process, without FSDP, on the same batches. Exit status 1 means
that the two runs differ by more than rounding explains, or that the loss did not halve.
"""

import argparse
import functools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import _setup  # noqa: F401


# isort: split

from tqdm import tqdm

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _byte_lm import build_model, ByteLM, SEQUENCE_LENGTH, text_batches
from _compare import difference_table, loss_difference, parameter_differences
from _half_products import widen_half_products
from _launch import (
    as_rank,
    available_cores,
    DEFAULT_STEPS,
    is_worker,
    launch,
    make_parser,
    parse_args,
    TOLD,
)
from _master_sgd import LOSS_SCALE, MasterSGD
from _policies import Casting, CHOICES, DEFAULT, dtypes_under
from _report import draw_losses, draw_wire, wire_table
from _wire import measured, meter, one_unit_per_dtype, StepTraffic, UnitKind
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


OUTPUT = Path(__file__).resolve().parents[1] / "build" / "train"


def shard(model: ByteLM, mesh: DeviceMesh, policy_name: str) -> list[UnitKind]:
    """Makes each block one unit, and what is left of the model another.

    Nothing here looks at dtypes but to tell what will be sent: a unit takes
    parameters of any.
    """
    policy = CHOICES[policy_name].policy_for(model)
    by_name = dtypes_under(policy, model, torch.device(mesh.device_type))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    dtypes = {p: by_name[name] for name, p in model.named_parameters()}
    # Blocks free their parameters after forward and gather them again in backward.
    return [
        meter("block", list(model.blocks), unshards=2, dtypes=dtypes),
        meter("root", [model], unshards=1, dtypes=dtypes),
    ]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(
    model: nn.Module,
    args: argparse.Namespace,
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    title: str,
) -> list[float]:
    """Trains on this rank's share of each batch; returns the losses over all ranks."""
    optimizer = MasterSGD(model.parameters(), args.steps)
    losses: list[float] = []
    start = time.perf_counter()
    with tqdm(
        total=args.steps,
        desc=title,
        unit="step",
        disable=rank != 0,
        mininterval=0.1 if sys.stderr.isatty() else 5.0,
    ) as bar:
        for batch in text_batches(args.steps, args.batch_size):
            tokens, targets = (t.chunk(world_size)[rank].to(device) for t in batch)
            loss = loss_of(model, tokens, targets)
            (LOSS_SCALE * loss).backward()
            optimizer.step()
            mean = loss.detach() / world_size
            if world_size > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
            bar.update()
            seen = len(losses) * args.batch_size * SEQUENCE_LENGTH
            rate = seen / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s", False)
    return losses


def measure_upcast(
    args: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> StepTraffic:
    """What a step sends where every parameter is made fp32 first."""
    model = build_model().float().to(device)
    kinds = shard(model, mesh, DEFAULT)
    tokens, targets = next(text_batches(1, args.nproc))
    share = slice(mesh.get_rank(), mesh.get_rank() + 1)
    loss_of(model, tokens[share].to(device), targets[share].to(device)).backward()
    return measured("all fp32", kinds, steps=1)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, unsharded, on every rank."""
    weights = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.detach().full_tensor()
    return weights


@dataclass
class ShardedRun:
    """What is left of the run with FSDP: none of it is sharded any more."""

    losses: list[float]
    weights: dict[str, Tensor]
    kinds: list[UnitKind]
    upcast: StepTraffic


def train_sharded(args: argparse.Namespace, device: torch.device) -> ShardedRun:
    """Trains over all processes, and measures what is sent meanwhile."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (args.nproc,))
    model = build_model().to(device)
    kinds = shard(model, mesh, args.policy)
    losses = train(
        model,
        args,
        device,
        rank=mesh.get_rank(),
        world_size=args.nproc,
        title=f"FSDP2, {processes(args.nproc)}",
    )
    weights = full_weights(model)
    upcast = measure_upcast(args, mesh, device)
    dist.destroy_process_group()
    return ShardedRun(losses, weights, kinds, upcast)


def processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def train_alone(
    args: argparse.Namespace, device: torch.device
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Trains without FSDP; returns the losses, and the weights before and after."""
    torch.set_num_threads(available_cores())  # the other processes are done
    model = build_model().to(device)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = CHOICES[args.policy].policy_for(model)
    casting = Casting(model, dtypes_under(policy, model, device))
    losses = train(casting, args, device, title="1 process, no FSDP")
    return losses, initial, dict(model.named_parameters())


def report(args: argparse.Namespace, device: torch.device, run: ShardedRun) -> int:
    """Prints and draws what was sent and how it compares; returns the exit status."""
    if args.policy != DEFAULT:
        print(f"\nPolicy {args.policy}: {CHOICES[args.policy].meaning}")
    print("\nOne step sends:\n")
    print(wire_table(run.kinds, args.steps), flush=True)
    ways = [
        measured("this branch", run.kinds, args.steps),
        one_unit_per_dtype("one unit per dtype\n(computed)", run.kinds),
        run.upcast,
    ]
    losses, initial, weights = train_alone(args, device)
    differences = [
        loss_difference(run.losses, losses),
        *parameter_differences(run.weights, weights, initial),
    ]
    print("\nThe two runs differ at most by:\n")
    print(difference_table(differences))

    title = processes(args.nproc)
    pictures = [OUTPUT / "loss.png", OUTPUT / "wire.png"]
    try:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        draw_losses(pictures[0], run.losses, losses, f"FSDP2, {title}")
        draw_wire(pictures[1], ways, f"Sent in one step, {title}")
        drawn = " ".join(map(os.path.relpath, pictures))
    except OSError as error:  # a clone that is read-only, or a full disk
        drawn = f"none, {error.strerror}: {error.filename}"
    last = sum(run.losses[-10:]) / len(run.losses[-10:])
    print(f"\nLoss:     {run.losses[0]:.3f} at the first step, {last:.3f} at the end")
    print(f"Pictures: {drawn}")
    wrong = [d.what for d in differences if not d.ok]
    faults = [f"the two runs differ too much in {', '.join(wrong)}"] if wrong else []
    if not last <= run.losses[0] / 2:
        text = f"the loss did not fall by half in {args.steps} steps"
        if args.steps >= DEFAULT_STEPS:
            faults.append(text)
        else:
            print(f"Note:     {text}; {DEFAULT_STEPS} are enough")
    if faults:
        print(f"error: {'; '.join(faults)}", file=sys.stderr)
    return TOLD if faults else 0


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--policy",
        choices=CHOICES,
        default=DEFAULT,
        metavar="NAME",
        help="what parameters compute and reduce in, see below (default: %(default)s)",
    )
    meanings = [f"  {name:<20}  {choice.meaning}" for name, choice in CHOICES.items()]
    parser.epilog = "\n".join(["policies:", *meanings])
    args = parse_args(parser, argv)
    if not is_worker():
        return launch(__file__, args.nproc, argv)
    return as_rank(functools.partial(train_rank, args))


def train_rank(args: argparse.Namespace) -> int:
    """Does what one process has to do; returns its exit status."""
    widen_half_products()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    run = train_sharded(args, device)
    return report(args, device, run) if os.environ["RANK"] == "0" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
