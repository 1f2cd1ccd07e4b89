"""Trains one model on five meshes over the same ranks, and compares every bit.

    python examples/same_bits.py [--nproc N] [--steps N]

Fully sharded, sharded within groups and replicated over them, or replicated only: with
grad_comm_dtype=torch.bfloat16 gradients are sent in bf16 and added in fp32, in an order
that the mesh does not change. Losses, gradients and parameters are then the same, byte
for byte. The same runs without it show what the mesh does otherwise. Digests differ from
machine to machine, as products of matrices do: compare rows, not runs. Exit status 1 means
that a mesh gave other bits with grad_comm_dtype, or that all gave the same without it.
"""

import argparse
import functools
import hashlib
import sys
from collections.abc import Iterable
from typing import cast

import _setup  # noqa: F401


# isort: split

from tabulate import tabulate

import torch
import torch.distributed as dist
from _launch import make_parser, parse_args, run
from torch import nn, Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


WIDTH, VOCABULARY, ROWS = 64, 256, 4
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """Matrices in bf16, a norm and a decay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=FP32)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=BF16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=BF16)
        self.decay = nn.Parameter(torch.zeros(WIDTH, dtype=FP32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.norm(x).to(BF16))))
        return x * torch.exp(-torch.exp(self.decay)) + hidden.float()


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(embedding, *(Block() for _ in range(3)), head)


def layouts(ranks: int) -> dict[str, tuple[int, int]]:
    """Returns what each mesh is called, and its replicas and the shards of each."""
    powers = range(ranks.bit_length() - 1)
    shapes = [(2**i, ranks // 2**i) for i in powers] + [(ranks, 1)]
    return {f"{replicas} x {shards}": (replicas, shards) for replicas, shards in shapes}


# What a run's digests are of; those of `clip_grad_norm_`'s norm depend on the mesh
SAME = ("losses", "gradients", "parameters", "norm_of")
COLUMNS = ("losses", "gradients", "parameters", "norm", "norm_of")


def norm_of(grads: Iterable[DTensor]) -> Tensor:
    """
    Returns the norm of all gradients, of which one at a time is there in full: the
    order in which it adds up does not depend on the mesh either.
    """
    norms = [torch.linalg.vector_norm(grad.full_tensor().float()) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms))


def train(
    args: argparse.Namespace, layout: str, comm: torch.dtype | None
) -> dict[str, str]:
    """Returns a row of the table: digests of what all steps gave, and the last loss."""
    policy = MixedPrecisionPolicy(
        reduce_dtype=FP32 if comm else None,
        grad_comm_dtype=comm,
        cast_forward_inputs=False,
    )
    model = build_model().to(args.device)
    if layout == "replicate":
        mesh = init_device_mesh(args.device, (args.nproc,))
        apply = functools.partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        names, shape = ("replicate", "shard"), layouts(args.nproc)[layout]
        mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
        apply = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    for i in range(1, len(model) - 1):
        apply(model[i])
    apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(dist.get_rank())
    digests = {column: hashlib.sha256() for column in COLUMNS}
    losses = [torch.empty((), device=args.device) for _ in range(args.nproc)]
    for _ in range(args.steps):
        tokens = torch.randint(VOCABULARY, (ROWS, 17), generator=batches)
        tokens = tokens.sort(dim=1).values.to(args.device)  # something to learn
        logits = model(tokens[:, :-1].flatten())
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        dist.all_gather(losses, loss.detach())
        grads = [cast(DTensor, param.grad) for param in model.parameters()]
        update(digests["losses"], losses)
        update(digests["gradients"], (grad.full_tensor() for grad in grads))
        norm = cast(DTensor, nn.utils.get_total_norm(grads))
        update(digests["norm"], [norm.full_tensor()])
        update(digests["norm_of"], [norm_of(grads)])
        optimizer.step()
        optimizer.zero_grad()
        params = [cast(DTensor, param) for param in model.parameters()]
        update(digests["parameters"], (param.full_tensor() for param in params))
    found = {column: digest.hexdigest()[:8] for column, digest in digests.items()}
    last = torch.stack(losses).mean().item()
    return {"mesh": layout, **found, "last loss": f"{last:.6f}"}


def update(digest: "hashlib._Hash", tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())


def compare(args: argparse.Namespace) -> int:
    is_first, status = dist.get_rank() == 0, 0
    for comm, title in (
        (BF16, "grad_comm_dtype=torch.bfloat16"),
        (None, "without grad_comm_dtype"),
    ):
        names = [*layouts(args.nproc), "replicate"]
        rows = [train(args, name, comm) for name in names]
        if is_first:
            what = f"{args.steps} steps, {args.nproc} ranks: digests of all bits"
            table = tabulate(rows, "keys", "plain", disable_numparse=True)
            print(f"{title}, {what}\n{table}\n", flush=True)
        kinds = {tuple(row[column] for column in SAME) for row in rows}
        if (len(kinds) == 1) != (comm is not None):
            status = 1
    if is_first:
        print("Digests depend on the machine: compare the rows of one run.", flush=True)
    return status


def main(argv: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(steps=6, nproc=8)
    args = parse_args(parser, argv)

    def compare_rank(device: torch.device) -> int:
        torch.set_num_threads(1)
        return compare(args)

    return run(args, argv, compare_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
