"""Studies of the collectives of a training step: what they are, and send.

    python benchmarks/distributed/fsdp/studies.py counts|traffic

- counts: how many there are and their KiB, in each way to train, over 8 ranks.
- traffic: the MiB that a rank sends inside of its node and to other nodes.

One of many ranks runs a step with a process group that sends nothing and tensors that hold
nothing, so sizes are those of real models.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import _models
from _calls import Call, seen_by
from _models import ALL_FP32, AS_IT_IS, BOTH, EXCHANGED, JOINED, LARGE, PER_DTYPE

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


NODE = 8  # ranks, numbered node by node
WAYS = (AS_IT_IS, EXCHANGED, JOINED, BOTH, ALL_FP32, PER_DTYPE)


class Mesh(NamedTuple):
    replicas: int
    shards: int

    @contextlib.contextmanager
    def faked(self) -> Iterator[DeviceMesh]:
        size = self.replicas * self.shards
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        shape, names = (self.replicas, self.shards), ("replicate", "shard")
        if self.replicas == 1:
            shape, names = (self.shards,), ("shard",)
        try:
            yield init_device_mesh("cpu", shape, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()


def calls_of(
    block: type[_models.Block], count: int, way: str, mesh: Mesh, **sizes: int
) -> list[Call]:
    """Returns the collectives of one step of some blocks, each gathered twice."""
    calls: list[Call] = []
    with mesh.faked() as device_mesh, FakeTensorMode():
        model = nn.Sequential(*(block(**sizes) for _ in range(count)))
        for module in model.modules() if way == ALL_FP32 else ():
            # They hold nothing: `float` would swap them
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(param.float()))
        _models.shard(model, way, device_mesh)
        dtype = _models.FP32 if way == ALL_FP32 else _models.BF16
        with seen_by(calls.append):
            _models.training_step(
                model, torch.randn(1, 4, sizes.get("dim", 512), dtype=dtype)
            )
    return calls


def line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: Any) -> None:
    print(line(*cells), "|---" * len(cells) + "|", sep="\n")


def print_counts() -> None:
    """Gathers and reductions of a step of three blocks, and the KiB of both."""
    header("blocks", *WAYS)
    for name, block in _models.BLOCKS.items():
        cells = []
        for way in WAYS:
            calls = calls_of(block, 3, way, Mesh(1, 8))
            gathers = sum(call.kind == "all-gather" for call in calls)
            kib = sum(call.nbytes for call in calls) / 2**10
            cells.append(f"{gathers} + {len(calls) - gathers}; {kib:,.0f}")
        print(line(name, *cells))


def sent(call: Call) -> tuple[float, float]:
    """
    Returns the bytes that a rank sends inside of its node and to others, on average: in
    an all-to-all to every other rank, in a ring to the next.
    """
    inside = min(
        call.ranks, max(NODE // call.stride, 1)
    )  # ranks of the group in a node
    part = call.nbytes / call.ranks
    if call.kind == "all-to-all":
        return part * (inside - 1), part * (call.ranks - inside)
    crossing = 0.0 if call.ranks == inside else 1 / inside  # the last rank of each node
    return call.sent_nbytes * (1 - crossing), call.sent_nbytes * crossing


def meshes(ranks: Sequence[int]) -> Iterator[Mesh]:
    for count in ranks:
        yield Mesh(1, count)
        if count > NODE:
            yield Mesh(count // NODE, NODE)


def print_traffic(ranks: Sequence[int]) -> None:
    """MiB of the reductions of one bf16 block, whose gradients are added in fp32."""
    columns = [
        f"{way}: {w}"
        for way in (_models.WIDE, _models.NARROW)
        for w in ("in a node", "between")
    ]
    header("mesh", *columns)
    for mesh in meshes(ranks):
        cells = []
        for way in (_models.WIDE, _models.NARROW):
            calls = calls_of(
                _models.BLOCKS["Llama-like"], 1, way, mesh, **LARGE["Llama-like"]
            )
            # The gathers of parameters come first
            first = next(i for i, call in enumerate(calls) if call.kind != "all-gather")
            totals = (sum(way) / 2**20 for way in zip(*map(sent, calls[first:])))
            cells += [f"{total:.1f}" for total in totals]
        print(line(f"{mesh.replicas} x {mesh.shards}", *cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("counts", "traffic"))
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N")
    args = parser.parse_args()
    if args.study == "counts":
        print_counts()
    else:
        print_traffic(args.ranks or (8, 16, 64, 256, 1024))


if __name__ == "__main__":
    main()
