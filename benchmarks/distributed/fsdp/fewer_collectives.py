"""
Prints, as a table, all-gathers and reductions of one training step, and their KiB: as it
is by default, with ``grad_comm_dtype``, with ``set_reduce_bucket_cap``, with both, upcast
to fp32, and with one unit for each dtype.

    python benchmarks/distributed/fsdp/fewer_collectives.py

Counted over a process group that sends nothing: what FSDP2 calls and how large its
buffers are does not depend on the others. The blocks are those of the step benchmark,
over 8 ranks; the last model is that of ``make train``, over 2.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


# Where the model of `make train` is
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

from _calls import (
    BOTH,
    Call,
    EXCHANGED,
    finished,
    JOINED,
    PER_DTYPE,
    prepared,
    seen_by,
    sharded,
    TODAY,
    UPCAST,
)
from _models import BF16, BLOCKS, FP32, NUM_BLOCKS

import torch
import torch.distributed as dist
from _byte_lm import build_model
from _policies import CHOICES, DEFAULT
from _wire import one_unit_per_dtype
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from train_mixed_dtype import shard


WAYS = (TODAY, EXCHANGED, JOINED, BOTH, UPCAST, PER_DTYPE)
FP32_SUMS = "Llama-like, fp32 sums"
TRAINED = "`make train`"
# Of each model
RANKS = {**dict.fromkeys((*BLOCKS, FP32_SUMS), 8), TRAINED: 2}


def calls_in(step: Callable[[], Tensor]) -> list[Call]:
    """Returns the collectives of a forward and its backward."""
    calls: list[Call] = []
    with seen_by(calls.append):
        step().float().square().mean().backward()
    return calls


def of_blocks(name: str, way: str, mesh: DeviceMesh) -> list[Call]:
    policy = None
    if name == FP32_SUMS:
        policy, name = MixedPrecisionPolicy(BF16, FP32), "Llama-like"
    model = sharded([BLOCKS[name]() for _ in range(NUM_BLOCKS)], way, mesh, policy)
    # Fewer tokens than in the step benchmark, which sends as much
    x = torch.randn(1, 4, 512, dtype=FP32 if way == UPCAST else BF16)
    return calls_in(lambda: model(x))


def of_training(way: str, mesh: DeviceMesh) -> list[Call]:
    """As ``make train`` shards its model, which counts by a reduce-scatter of its own."""
    model = build_model()
    policy = prepared(model, way, CHOICES[DEFAULT].policy_for(model))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    finished(model, way)
    tokens = torch.arange(8).view(1, 8)
    return calls_in(lambda: model(tokens))


def of_training_per_dtype(mesh: DeviceMesh) -> tuple[tuple[int, int], int]:
    """Computes what else is counted: modules cannot set all parameters apart."""
    sent = one_unit_per_dtype("", shard(build_model(), mesh, DEFAULT))
    counts = int(sent.gathers.calls), int(sent.reductions.calls)
    return counts, int(sent.gathers.nbytes + sent.reductions.nbytes)


def cell(name: str, way: str, mesh: DeviceMesh) -> str:
    """Returns gathers and reductions, and the KiB of both."""
    if name == TRAINED and way == PER_DTYPE:
        counts, nbytes = of_training_per_dtype(mesh)
    else:
        of = of_training if name == TRAINED else functools.partial(of_blocks, name)
        calls = of(way, mesh)
        gathers = sum(call.kind == "all-gather" for call in calls)
        counts = gathers, len(calls) - gathers
        nbytes = sum(call.nbytes for call in calls)
    return f"{counts[0]} + {counts[1]}; {nbytes / 2**10:,.0f}"


def table() -> list[str]:
    lines = [f"| model | {' | '.join(WAYS)} |", "|---" * (1 + len(WAYS)) + "|"]
    for name, ranks in RANKS.items():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,))
        cells = [cell(name, way, mesh) for way in WAYS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        dist.destroy_process_group()
    return lines


@functools.cache
def leave_products_out() -> torch.library.Library:
    """Has matrices multiplied by no one: what is sent does not depend on values."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("mm", lambda a, b: a.new_empty(a.size(0), b.size(1)), "CPU")
    return library


if __name__ == "__main__":
    leave_products_out()
    sys.exit(print("\n".join(table())))
