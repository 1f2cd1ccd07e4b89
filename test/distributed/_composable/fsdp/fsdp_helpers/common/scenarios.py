"""Scenarios for four ranks, under any torch. An error is saved as a result."""

import argparse
import gc
import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common.parity_layers import BF16, FP32, Record, Stack, stack

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


RANKS = 4
TIMEOUT = timedelta(seconds=300)
LAYOUT = "torch.distributed.fsdp._fully_shard._fsdp_layout"
IS_BRANCH = find_spec(LAYOUT) is not None
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "bf16": MixedPrecisionPolicy(BF16),
    "reduce_bf16": MixedPrecisionPolicy(None, BF16),
}


@dataclass(frozen=True)
class Setup:
    """The rank, meshes and kind of units that a scenario runs with."""

    rank: int  # in the mesh
    mesh: DeviceMesh  # of all ranks, or of the two that share a scenario
    pairs: DeviceMesh  # of all ranks, in two dims
    singles: DeviceMesh  # of all ranks, in two dims, of which each shards alone
    is_mixed: bool = False  # whether units have several dtypes

    @property
    def is_by_dtype(self) -> bool:
        """Whether units are cut as the release wants several dtypes."""
        return self.is_mixed and not IS_BRANCH

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        return (FP32, BF16, layers.FP16) if self.is_mixed else (FP32, FP32)

    def stack(self, blocks: int = 2) -> Stack:
        return stack((FP32, BF16 if self.is_mixed else FP32), blocks=blocks)

    def sharded(self, policy: str = "none", model: Any = None, **kwargs: Any) -> Stack:
        kwargs = {"mesh": self.mesh, "mp_policy": POLICIES[policy]} | kwargs
        return layers.shard_stack(self.stack() if model is None else model, **kwargs)


# Runs the step of a number, and returns the loss where there is one
Step = Callable[[nn.Module, Setup, int], Any]


@dataclass(frozen=True)
class Scenario:
    run: Callable[[Setup], Record]
    is_mixed: bool = False
    is_on_release: bool = True
    by_halves: bool = False  # run by two of the ranks, while the others run another


class Scenarios(dict[str, Scenario]):
    """Scenarios of one script, by kind and name."""

    def add(
        self,
        run: Callable[[Setup], Record],
        name: str = "",
        *,
        kinds: Iterable[str] = ("uniform", "mixed"),
        as_by_dtype: bool = False,
        by_halves: bool = False,
    ) -> Callable[[Setup], Record]:
        """With ``as_by_dtype`` the release runs it, too, with mixed units cut by dtype."""
        for kind in kinds:
            is_mixed = kind == "mixed"
            scenario = Scenario(run, is_mixed, as_by_dtype or not is_mixed, by_halves)
            self[f"{kind} {name or run.__name__}"] = scenario
        return run

    def names(self, is_on_release: bool) -> list[str]:
        return [n for n, each in self.items() if each.is_on_release == is_on_release]

    def run_all(self, only: Sequence[str] | None, rank: int) -> dict[str, Record]:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (RANKS,))
        pairs, singles = (
            init_device_mesh("cpu", (RANKS // n, n), mesh_dim_names=names)
            for n in (2, 1)
        )
        whole = Setup(rank, mesh, pairs, singles)
        half = replace(whole, rank=rank % 2, mesh=pairs["shard"])
        results: dict[str, Record] = {}
        turns = itertools.cycle(range(2))
        for name, scenario in self.items():
            is_asked_for = not only or name in only
            if not is_asked_for or not (IS_BRANCH or scenario.is_on_release):
                continue
            if scenario.by_halves and next(turns) != rank // 2:
                continue  # the other half's
            setup = half if scenario.by_halves else whole
            results[name] = outcome_of(
                scenario.run, replace(setup, is_mixed=scenario.is_mixed)
            )
        return results

    def main(
        self, description: str | None, beside: Callable[[], Record] | None = None
    ) -> None:
        """Runs each rank in a process; then ``beside``, which returns more, in this."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--out", required=True, help="folder for a file by rank")
        parser.add_argument("--only", nargs="+", help="scenarios to run, default all")
        parser.add_argument("--half", type=int, help="run every other rank from this")
        parser.add_argument("--store", help="file by which the halves meet")
        args = parser.parse_args()
        gc.freeze()  # or a collection in a rank would copy all that is imported
        with tempfile.TemporaryDirectory() as folder:
            args.store = args.store or f"{folder}/store"
            ranks = RANKS if args.half is None else RANKS // 2
            # A fork has imported torch already
            mp.start_processes(self._run_rank, (args,), ranks, start_method="fork")
        if beside is not None and not args.half and not args.only:
            found = pickle.dumps(outcome_of(beside))
            (Path(args.out) / f"rank{RANKS}").write_bytes(found)
        print(torch.__file__)

    def _run_rank(self, index: int, args: argparse.Namespace) -> None:
        """Runs one rank, and writes its results to a file of its own."""
        rank = index if args.half is None else 2 * index + args.half
        torch.set_num_threads(1)
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{args.store}",
            rank=rank,
            world_size=RANKS,
            timeout=TIMEOUT,
        )
        results = pickle.dumps(self.run_all(args.only, rank))
        (Path(args.out) / f"rank{rank}").write_bytes(results)
        dist.destroy_process_group()


def outcome_of(run: Callable[..., Record], *args: Any) -> Record:
    """Returns what was recorded, or the error: all ranks fail alike."""
    try:
        return run(*args)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def one_backward(model: nn.Module, setup: Setup, step: int) -> torch.Tensor:
    loss = layers.loss_of(model(layers.batch_of(step, setup.rank)))
    loss.backward()
    return loss


def train(
    model: nn.Module, setup: Setup, *, steps: range = range(2), run: Step = one_backward
) -> Record:
    """Returns each step's loss, sharded gradients and parameters."""
    return layers.train_steps(model, lambda step: run(model, setup, step), steps)


def describe(value: Any) -> Any:
    """Returns what can be compared between processes."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape)
    if isinstance(value, list):
        return [describe(each) for each in value]
    if isinstance(value, tuple):
        return type(value).__name__, [describe(each) for each in value]
    plain_types = (str, bool, int, float, torch.dtype, torch.device, type(None))
    return str(value) if isinstance(value, plain_types) else type(value).__name__
