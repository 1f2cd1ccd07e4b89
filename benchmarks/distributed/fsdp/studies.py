"""The MiB that a rank sends inside of its node and to other nodes, to reduce gradients.

    python benchmarks/distributed/fsdp/studies.py traffic [--ranks N ...]

One of many ranks runs a step with a process group that sends nothing and tensors that hold
nothing, so sizes are those of real models.
"""

import argparse
import itertools
from collections.abc import Sequence

import _models
from _calls import Call, seen_by

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


NODE = 8  # ranks, numbered node by node
SIZES = _models.LARGE["Llama-like"]
WAYS = (_models.WIDE, _models.NARROW)


def reductions_of(way: str, replicas: int, shards: int) -> list[Call]:
    """Returns those of one bf16 block, whose gradients are added in fp32."""
    calls: list[Call] = []
    size, names = replicas * shards, ("replicate", "shard")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
        mesh = mesh if replicas > 1 else mesh["shard"]
        with FakeTensorMode():
            model = nn.Sequential(_models.LlamaBlock(**SIZES))
            _models.shard(model, way, mesh)
            x = torch.randn(1, 4, SIZES["dim"], dtype=_models.BF16)
            with seen_by(calls.append):
                _models.training_step(model, x)
    finally:
        dist.destroy_process_group()
    # The gathers of parameters come first
    return [*itertools.dropwhile(lambda call: call.kind == "all-gather", calls)]


def sent(call: Call) -> tuple[float, float]:
    """Returns the mean bytes that a rank sends inside of its node and to others."""
    # Ranks of the group in a node
    inside = min(call.ranks, max(NODE // call.stride, 1))
    part = call.nbytes / call.ranks
    if call.kind == "all-to-all":
        return part * (inside - 1), part * (call.ranks - inside)
    crossing = 0.0 if call.ranks == inside else 1 / inside  # the last rank of each node
    return call.sent_nbytes * (1 - crossing), call.sent_nbytes * crossing


def print_traffic(ranks: Sequence[int]) -> None:
    columns = [f"{way}: {w}" for way in WAYS for w in ("in a node", "between")]
    print(f"| {' | '.join(['mesh', *columns])} |", "|---" * 5 + "|", sep="\n")
    for count in ranks:
        for replicas in dict.fromkeys((1, max(count // NODE, 1))):
            cells = [f"{replicas} x {count // replicas}"]
            for way in WAYS:
                calls = reductions_of(way, replicas, count // replicas)
                totals = (sum(each) / 2**20 for each in zip(*map(sent, calls)))
                cells += [f"{total:.1f}" for total in totals]
            print(f"| {' | '.join(cells)} |")


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
