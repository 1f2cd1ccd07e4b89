"""Trains a language model whose FSDP2 units hold bf16, fp32 and fp16 parameters.

    python examples/train_mixed_dtype.py [--nproc N] [--steps N] [--policy NAME]

Parameters compute and reduce in the dtypes that they are stored in, or as the policy says:
a table tells what each unit gathers and reduces. Without a policy the first steps are
compared with one process without FSDP. Exit status 1 means that they differ by more than
rounding explains, or that the loss did not halve.
"""

import argparse
import sys

import _setup  # noqa: F401


# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _byte_lm import ByteLM, text_batches
from _launch import make_mesh, make_parser, parse_args, run
from _one_process import report, train_side_by_side
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, layout_summary, MixedPrecisionPolicy


STEPS, CHECKED = 120, 3
SEQUENCES = 8  # of a step, for each process
# Gradients of fp16 parameters would underflow without it
LOSS_SCALE = 2.0**12
BF16, FP32 = torch.bfloat16, torch.float32
_IN_FP32 = {"param_dtype": FP32, "reduce_dtype": FP32}
_SENSITIVE = {"*norm.*": _IN_FP32, "*.A_log": _IN_FP32}
_NARROW = {n: {**dtypes, "grad_comm_dtype": FP32} for n, dtypes in _SENSITIVE.items()}
# What each means, patterns of names, and what all other parameters get
POLICIES = {
    "stored": ("each parameter computes and reduces as it is stored", {}, {}),
    "bf16": (
        "all compute and reduce in bf16",
        {},
        {"param_dtype": BF16, "reduce_dtype": BF16},
    ),
    "bf16-fp32-norms": (
        "bf16, but norms and A_log compute and reduce in fp32",
        _SENSITIVE,
        {"param_dtype": BF16, "reduce_dtype": BF16},
    ),
    "bf16-fp32-sums": (
        "as bf16-fp32-norms, and all gradients reduce in fp32",
        _SENSITIVE,
        {"param_dtype": BF16, "reduce_dtype": FP32},
    ),
    "bf16-narrow-sums": (
        "as bf16-fp32-sums, but gradients are sent in what they are computed in",
        _NARROW,
        {"param_dtype": BF16, "reduce_dtype": FP32, "grad_comm_dtype": BF16},
    ),
    "fp32": ("all compute and reduce in fp32", {}, _IN_FP32),
}


def shard(model: nn.Module, mesh: DeviceMesh, policy: str) -> None:
    """Makes each block one unit, of whatever dtypes, and the rest of the model another."""
    _, patterns, dtypes = POLICIES[policy]
    mp_policy = MixedPrecisionPolicy.by_name(
        model,
        patterns,
        cast_forward_inputs=False,  # the residual stream between the blocks stays fp32
        **dtypes,
    )
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=False)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, scaled."""
    predicted = model(windows[:, :-1]).flatten(0, 1)
    return LOSS_SCALE * F.cross_entropy(predicted, windows[:, 1:].flatten())


def train_rank(args: argparse.Namespace, device: torch.device) -> int:
    """Does what one process has to do; returns its exit status."""
    is_first = dist.get_rank() == 0

    def shard_and_show(model: nn.Module, mesh: DeviceMesh) -> None:
        shard(model, mesh, args.policy)
        if is_first:
            print(f"Policy {args.policy}: {POLICIES[args.policy][0]}\n")
            print(layout_summary(model), "\n", flush=True)

    torch.manual_seed(0)
    windows = text_batches(args.steps, SEQUENCES * args.nproc)
    steps = train_side_by_side(
        ByteLM().to(device),
        shard_and_show,
        make_mesh(args.device),
        loss_of,
        (batch.to(device) for batch in windows),
        checked=CHECKED if args.policy == "stored" else 0,
    )
    losses, is_right = [], True
    for number, step in enumerate(steps, 1):
        step = step.scaled(1 / LOSS_SCALE)
        losses.append(step.loss)
        if step.differences or number % 20 == 0 or number == args.steps:
            is_right &= report(number, step)
    last = sum(losses[-10:]) / len(losses[-10:])
    is_halved = last <= losses[0] / 2
    if is_first:
        print(f"Loss: {losses[0]:.3f} at the first step, {last:.3f} at the end")
        if not is_halved:
            print(f"It did not fall by half; {STEPS} steps are enough", file=sys.stderr)
    return 0 if is_right and (is_halved or args.steps < STEPS) else 1


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(steps=STEPS)
    parser.add_argument("--policy", choices=POLICIES, default="stored", metavar="NAME")
    meanings = [f"  {name:<20}  {of[0]}" for name, of in POLICIES.items()]
    parser.epilog = "\n".join(["policies:", *meanings])
    args = parse_args(parser, argv)
    return run(args, argv, lambda device: train_rank(args, device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
