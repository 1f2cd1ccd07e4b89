"""Trains a tiny model of transformers, diffusers or peft, of several dtypes.

    python examples/train_real_model.py NAME [--nproc N] [--replicas N] [--steps N]

Weights are random; dtypes are those that the model's checkpoints or its library have. Each
step is compared with one process without FSDP; exit status 1 says that they differ.
``make models`` installs what is needed.
"""

import sys

import _setup  # noqa: F401


# isort: split
import torch
import torch.distributed as dist
from _launch import make_mesh, make_parser, parse_args, positive, run
from _one_process import report
from _real_model import token_batches, train
from _tiny_models import TINY_MODELS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import layout_summary


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    names = ", ".join(TINY_MODELS)
    parser.add_argument("name", choices=TINY_MODELS, metavar="NAME", help=names)
    groups = "groups that each have the whole model, sharded inside (default: 1)"
    parser.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help=groups
    )
    args = parse_args(parser, argv)
    if args.nproc % args.replicas:
        parser.error(
            f"--replicas {args.replicas}: {args.nproc} processes do not divide"
        )

    def train_rank(device: torch.device) -> int:
        tiny = TINY_MODELS[args.name]

        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            tiny.shard(model, mesh)
            if dist.get_rank() == 0:
                print(layout_summary(model), flush=True)

        mesh = make_mesh(args.device, args.replicas)
        batches = token_batches(args.steps, 4 * args.nproc, device)
        steps = train(tiny.build_model, shard, mesh, batches, device, tiny.loss_of)
        is_right = [report(number, step) for number, step in enumerate(steps, 1)]
        return 0 if all(is_right) else 1

    return run(args, argv, train_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
