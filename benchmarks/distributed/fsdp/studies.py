"""The MiB that a rank sends inside of its node and to other nodes, to reduce gradients.

    python benchmarks/distributed/fsdp/studies.py traffic [--ranks N ...]

One of many ranks runs a step with a process group that sends nothing and tensors that hold
nothing, so sizes are those of real models.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import _models
from _calls import Call, seen_by
from _models import LARGE

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


NODE = 8  # ranks, numbered node by node


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
        _models.shard(model, way, device_mesh)
        x = torch.randn(1, 4, sizes.get("dim", 512), dtype=_models.BF16)
        with seen_by(calls.append):
            _models.training_step(model, x)
    return calls


def line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: Any) -> None:
    print(line(*cells), "|---" * len(cells) + "|", sep="\n")


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
    parser.add_argument("study", choices=("traffic",))
    ranks = (8, 16, 64, 256, 1024)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", default=ranks)
    print_traffic(parser.parse_args().ranks)


if __name__ == "__main__":
    main()
